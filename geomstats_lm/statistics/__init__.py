"""How sure can we be? Inference for labelled measurements that are neither normal nor independent.

    rank_correlation(data, "kl ~ residual_norm", by=("model", "layer"), cluster="document")

The array kernels (`ranks`, `biweight`, `resampling`, ...) know nothing of labels; the verbs add
dims, names and the tidy tables of R's broom.
"""

from geomstats_lm.statistics.bootstrap import cluster_bootstrap
from geomstats_lm.statistics.compare import compare_correlations
from geomstats_lm.statistics.correlation import rank_correlation
from geomstats_lm.statistics.distinct import test_distinct
from geomstats_lm.statistics.mixed import mixed_model
from geomstats_lm.statistics.multiplicity import adjust, adjust_p_values
from geomstats_lm.statistics.pooling import RankCorrelation
from geomstats_lm.statistics.regression import ols, quantile_regression
from geomstats_lm.statistics.results import Result
from geomstats_lm.statistics.synthesis import MetaAnalysis, meta_analysis

__all__ = [
    "MetaAnalysis",
    "RankCorrelation",
    "Result",
    "adjust",
    "adjust_p_values",
    "cluster_bootstrap",
    "compare_correlations",
    "meta_analysis",
    "mixed_model",
    "ols",
    "quantile_regression",
    "rank_correlation",
    "test_distinct",
]
