"""Coverage and level: a short simulation here, the long one slow, its tables kept and checked.

Bounds are the nominal value plus or minus four Monte Carlo errors, so that a sound interval fails
one run in ten thousand; the bounds on the kept tables are those that the defaults were chosen by.
"""

import inspect

import numpy as np
import pandas as pd
import pytest

from analyses.coverage import (
    CLUSTERS,
    RESULTS,
    coverage,
    false_discoveries,
    false_positives,
    true_spearman,
)
from geomstats_lm.statistics import rank_correlation

DEFAULT = inspect.signature(rank_correlation).parameters["interval"].default


def error(share, n):
    return np.sqrt(share * (1 - share) / n)


def test_the_true_correlation_is_that_of_many_independent_pairs():
    from scipy import stats

    xy = np.random.default_rng(0).multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 200_000)
    # the standard error of 200,000 pairs is about .0015
    assert stats.spearmanr(xy).statistic == pytest.approx(true_spearman(0.6), abs=0.006)


def test_cluster_intervals_cover_and_the_iid_bootstrap_does_not():
    table = coverage(
        40, 0.6, n_simulations=120, n_boot=199, seeds=(1, 2), kinds=(DEFAULT, "robust")
    )
    share = table.set_index("interval")["coverage"]
    low = 0.93 - 4 * error(0.93, 120)
    assert share[DEFAULT] > low and share["robust"] > low
    assert share["iid bootstrap"] < 0.85


def test_permutations_that_respect_the_dependence_hold_their_level():
    table = false_positives(20, n_simulations=150, n_permutations=199, seeds=(1, 2))
    share = table.set_index("test")["false_positives"]
    high = 0.05 + 4 * error(0.05, 150)
    for name in ("clusters, total", "clusters, between", "shift, within"):
        assert share[name] < high, name
    assert share["single tokens (wrong)"] > 0.15


def test_the_false_discovery_rate_is_held():
    row = false_discoveries(n_simulations=40, n_boot=199).iloc[0]
    assert row["false_discovery_rate"] < 0.05 + 4 * max(row["mc_error"], 0.01)


def test_the_kept_tables_support_the_default():
    table = pd.read_csv(RESULTS / "coverage.csv")
    assert sorted(table["n_clusters"].unique()) == list(CLUSTERS)
    # the largest setting may rest on fewer simulations; its bounds are wider by its own error
    assert (table.loc[table["n_clusters"] < 200, "n_simulations"] >= 2000).all()
    assert (table["n_simulations"] >= 600).all()
    held = table[(table["interval"] == DEFAULT) & (table["n_clusters"] >= 40)]
    slack = np.where(held["n_simulations"] >= 2000, 0.0, 2 * held["mc_error"])
    assert len(held) == 4
    assert (held["coverage"] > 0.93 - slack).all() and (held["coverage"] < 0.97 + slack).all()
    assert (table.loc[table["interval"] == "iid bootstrap", "coverage"] < 0.8).all()
    tests = pd.read_csv(RESULTS / "false_positives.csv").set_index("test")
    sound = tests.drop(index="single tokens (wrong)")
    # 4 to 6 per cent, give or take twice the Monte Carlo error of the simulation itself
    slack = 2 * sound["mc_error"]
    assert (sound["false_positives"] > 0.04 - slack).all()
    assert (sound["false_positives"] < 0.06 + slack).all()
    assert (tests.loc["single tokens (wrong)", "false_positives"] > 0.15).all()
    found = pd.read_csv(RESULTS / "false_discoveries.csv").iloc[0]
    assert found["false_discovery_rate"] < 0.05 + 2 * found["mc_error"]
    assert DEFAULT in (RESULTS / "coverage.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_coverage_of_every_interval_at_forty_clusters(rho):
    table = coverage(40, rho, n_simulations=501, n_boot=399).set_index("interval")
    share = table["coverage"]
    for name in ("percentile", "basic", "bca", "bootstrap-t", "robust"):
        assert share[name] > 0.93 - 4 * error(0.93, 501), name
        assert share[name] < 0.97 + 4 * error(0.97, 501), name
    kept = pd.read_csv(RESULTS / "coverage.csv")
    kept = kept[(kept["n_clusters"] == 40) & (kept["rho"] == round(true_spearman(rho), 3))]
    for row in kept[kept["interval"].isin(share.index)].itertuples():
        limit = 4 * np.hypot(row.mc_error, max(error(share[row.interval], 501), 0.005))
        assert share[row.interval] == pytest.approx(row.coverage, abs=limit), row.interval


@pytest.mark.slow
@pytest.mark.parametrize("n_clusters", [10, 40])
def test_level_of_the_permutation_tests(n_clusters):
    table = false_positives(n_clusters, n_simulations=900, n_permutations=499).set_index("test")
    for name in ("clusters, total", "clusters, between", "shift, within"):
        share = table.loc[name, "false_positives"]
        assert 0.04 - 4 * error(0.04, 900) < share < 0.06 + 4 * error(0.06, 900), name
