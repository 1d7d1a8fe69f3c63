"""The array kernels against scipy on rows that really are repeated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomstats_lm.statistics.association import correlation_of_rows, resampled_correlation
from geomstats_lm.statistics.biweight import resampled_biweight
from geomstats_lm.statistics.ranks import (
    LANES,
    resampled_kendall,
    resampled_pearson,
    resampled_spearman,
)
from geomstats_lm.statistics.resampling import draw_counts

SCIPY = {
    resampled_spearman: stats.spearmanr,
    resampled_kendall: stats.kendalltau,
    resampled_pearson: stats.pearsonr,
}


def repeated(values, cluster, counts):
    """The resample written out: every row as often as its cluster was drawn."""
    return np.repeat(values, counts[cluster], axis=0)


def clustered(rng, n=240, n_clusters=12, ties=False):
    cluster = rng.integers(0, n_clusters, n)
    x = rng.normal(size=n) + rng.normal(size=n_clusters)[cluster]
    y = x + rng.normal(size=n)
    if ties:
        x, y = np.round(x), np.round(y)
    return x, y, cluster


@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kernel", list(SCIPY), ids=lambda kernel: kernel.__name__)
def test_every_resample_equals_scipy_on_the_repeated_rows(kernel, ties):
    # one full pass of lanes, and a second that is not full
    x, y, cluster = clustered(np.random.default_rng(1), ties=ties)
    counts = draw_counts(12, LANES + 5, seed=2)
    found = kernel(x, y, cluster, counts)
    for b in range(counts.shape[1]):
        rows = repeated(np.stack([x, y], axis=1), cluster, counts[:, b])
        # 1e-12: sums of at most 300 doubles, so rounding alone
        assert found[b] == pytest.approx(SCIPY[kernel](*rows.T).statistic, abs=1e-12)


def plain_biweight(x, y):
    """The definition, line by line."""

    def deviations(v):
        centred = v - np.median(v)
        u = centred / (9 * np.median(np.abs(centred)))
        return centred * (1 - u**2) ** 2 * (np.abs(u) < 1)

    a, b = deviations(x), deviations(y)
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("n", [60, 61], ids=["even", "odd"])
def test_biweight_equals_its_definition_in_every_resample(n):
    rng = np.random.default_rng(3)
    x, y, cluster = clustered(rng, n=n, n_clusters=7)
    x[:3] = 1000.0
    counts = draw_counts(7, 50, seed=1)
    found = resampled_biweight(x, y, cluster, counts)
    for b in range(50):
        rows = repeated(np.stack([x, y], axis=1), cluster, counts[:, b])
        assert found[b] == pytest.approx(plain_biweight(*rows.T), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_are_indifferent_to_order_and_to_increasing_maps(data):
    n = data.draw(st.integers(4, 40))
    integers = st.lists(st.integers(-5, 5), min_size=n, max_size=n)
    x = np.array(data.draw(integers), dtype=float)
    y = np.array(data.draw(integers), dtype=float)
    cluster = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    shuffle = np.array(data.draw(st.permutations(range(n))))
    counts = draw_counts(4, 8, seed=n)
    for kernel in (resampled_spearman, resampled_kendall):
        value = kernel(x, y, cluster, counts)
        moved = kernel(np.exp(x[shuffle]), y[shuffle] ** 3, cluster[shuffle], counts)
        np.testing.assert_allclose(moved, value, atol=1e-12)
        np.testing.assert_allclose(kernel(-x, y, cluster, counts), -value, atol=1e-12)
        np.testing.assert_allclose(kernel(y, x, cluster, counts), value, atol=1e-12)


def test_partial_rank_correlation_is_the_correlation_of_residuals_of_ranks():
    rng = np.random.default_rng(4)
    z = rng.normal(size=(200, 2))
    x = z @ [1.0, 0.5] + rng.normal(size=200)
    y = z @ [0.5, 1.0] + 0.5 * x + rng.normal(size=200)
    columns = np.column_stack([y, x, z])
    cluster = np.repeat(np.arange(20), 10)
    counts = draw_counts(20, 20, seed=0)
    partial = resampled_correlation(columns, cluster, counts)
    semi = resampled_correlation(columns, cluster, counts, semipartial=True)
    for b in range(20):
        ranks = stats.rankdata(repeated(columns, cluster, counts[:, b]), axis=0)
        design = np.column_stack([np.ones(len(ranks)), ranks[:, 2:]])
        residual = ranks[:, :2] - design @ np.linalg.lstsq(design, ranks[:, :2])[0]
        assert partial[b] == pytest.approx(np.corrcoef(residual.T)[0, 1], abs=1e-10)
        assert semi[b] == pytest.approx(np.corrcoef(ranks[:, 0], residual[:, 1])[0, 1], abs=1e-10)


@pytest.mark.parametrize("method", ["spearman", "pearson", "kendall", "biweight"])
@pytest.mark.parametrize("width", [2, 3])
def test_many_small_tables_agree_with_one_at_a_time(method, width):
    tables = np.random.default_rng(5).normal(size=(10, 9, width))
    one, cluster = np.ones((1, 1), np.int16), np.zeros(9, int)
    together = correlation_of_rows(tables, method=method)
    for table, value in zip(tables, together):
        alone = resampled_correlation(table, cluster, one, method=method)[0]
        assert value == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("kernel", [*SCIPY, resampled_biweight], ids=lambda k: k.__name__)
def test_a_constant_resample_is_nan_and_a_perfect_one_is_one(kernel):
    x = np.array([1.0, 1.0, 1.0, 2.0, 3.0, 4.5])
    cluster = np.array([0, 0, 0, 1, 1, 1])
    counts = np.array([[2, 0, 1], [0, 2, 1]], dtype=np.int16)
    found = kernel(x, 2 * x, cluster, counts)
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], 1.0, atol=1e-12)


def test_pearson_survives_a_large_offset_and_huge_or_tiny_scales():
    x, y, cluster = clustered(np.random.default_rng(6))
    counts = draw_counts(12, 10, seed=0)
    plain = resampled_pearson(x, y, cluster, counts)
    # an offset of 3000 costs the data themselves a few digits, hence 1e-9
    np.testing.assert_allclose(
        resampled_pearson(x * 1e200, y * 1e-200, cluster, counts), plain, atol=1e-12
    )
    np.testing.assert_allclose(resampled_pearson(x + 3e3, y, cluster, counts), plain, atol=1e-9)
    constant = np.full(x.size, 0.1)
    assert np.isnan(resampled_pearson(constant, y, cluster, counts)).all()


def test_infinite_values_have_ranks_but_no_moments():
    x = np.array([1.0, 2.0, 3.0, np.inf])
    y = np.array([-np.inf, 2.0, 3.0, 4.0])
    one, cluster = np.ones((1, 1), np.int16), np.zeros(4, int)
    assert resampled_spearman(x, y, cluster, one)[0] == pytest.approx(1.0)
    assert resampled_kendall(x, y, cluster, one)[0] == pytest.approx(1.0)
    assert np.isnan(resampled_pearson(x, y, cluster, one)[0])
    assert np.isnan(resampled_biweight(x, y, cluster, one)[0])
