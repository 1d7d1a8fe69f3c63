"""How sure can we be? Inference for labelled measurements that are neither normal nor independent.

    rank_correlation(data, "kl ~ residual_norm", by=("model", "layer"), cluster="document")

The array kernels (`ranks`, `biweight`, `resampling`) know nothing of labels; the verbs add dims,
names and the tidy tables of R's broom.
"""

from geomstats_lm.statistics.correlation import rank_correlation
from geomstats_lm.statistics.multiplicity import adjust, adjust_p_values
from geomstats_lm.statistics.pooling import RankCorrelation
from geomstats_lm.statistics.results import Result

__all__ = [
    "RankCorrelation",
    "Result",
    "adjust",
    "adjust_p_values",
    "rank_correlation",
]
