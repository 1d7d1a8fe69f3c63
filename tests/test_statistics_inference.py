"""Standard errors, decomposition, permutations and intervals, each against its definition."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats

from geomstats_lm.statistics import rank_correlation
from geomstats_lm.statistics.association import resampled_correlation
from geomstats_lm.statistics.decomposition import resampled_decomposition
from geomstats_lm.statistics.influence import clustered_std_errors
from geomstats_lm.statistics.permutation import exchange_test, shift_test
from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts, jackknife_counts


def clustered_columns(seed=0, n_clusters=60, size=12, ties=False):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(n_clusters), size)
    shared = rng.normal(size=(n_clusters, 3))[cluster]
    z = rng.normal(size=cluster.size) + shared[:, 0]
    x = z + rng.normal(size=cluster.size) + shared[:, 1]
    y = x + z + rng.normal(size=cluster.size) + shared[:, 2]
    columns = np.column_stack([y, x, z])
    return (np.round(columns) if ties else columns), cluster


@pytest.mark.parametrize("method", ["spearman", "kendall", "pearson"])
@pytest.mark.parametrize("width", [2, 3], ids=["pair", "partial"])
@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
def test_the_analytic_standard_error_is_near_that_of_the_jackknife(method, width, ties):
    columns, cluster = clustered_columns(ties=ties)
    columns = columns[:, :width]
    rho, error = clustered_std_errors(columns, cluster, np.ones((60, 1)), method=method)
    values = resampled_correlation(columns, cluster, jackknife_counts(60), method=method)
    jackknife = np.sqrt(59 / 60 * np.sum((values - values.mean()) ** 2))
    one = np.ones((60, 1), np.int16)
    expected = resampled_correlation(columns, cluster, one, method=method)[0]
    assert rho[0] == pytest.approx(expected, abs=1e-12)
    # both are consistent; they differ by terms of order 1/G = .017, a few times over
    assert error[0] == pytest.approx(jackknife, rel=0.05)


def test_without_association_it_is_the_clustered_regression_on_standardized_ranks():
    # at rho = 0 the terms beyond the regression's score vanish with n; here they are 1/sqrt(20000)
    rng = np.random.default_rng(3)
    cluster = np.repeat(np.arange(100), 200)
    x, y = rng.normal(size=(2, 20_000))
    _, error = clustered_std_errors(np.column_stack([y, x]), cluster, np.ones((100, 1)))
    ranks = stats.zscore(stats.rankdata(np.column_stack([x, y]), axis=0), axis=0)
    fit = sm.OLS(ranks[:, 1], sm.add_constant(ranks[:, 0])).fit(
        cov_type="cluster", cov_kwds={"groups": cluster}
    )
    assert error[0] == pytest.approx(fit.bse[1], rel=0.03)


def test_standard_errors_of_resamples_are_those_of_the_rows_written_out():
    columns, cluster = clustered_columns(n_clusters=15)
    counts = draw_counts(15, 6, seed=1)
    for method in ("spearman", "kendall", "pearson"):
        _, errors = clustered_std_errors(columns[:, :2], cluster, counts, method=method)
        for b in range(6):
            drawn = np.repeat(np.arange(15), counts[:, b])
            rows = np.concatenate([np.flatnonzero(cluster == g) for g in drawn])
            renamed = np.repeat(np.arange(15), 12)
            written = clustered_std_errors(
                columns[rows, :2], renamed, np.ones((15, 1)), method=method
            )
            assert errors[b] == pytest.approx(written[1][0], rel=1e-9)


@pytest.mark.parametrize("method", ["spearman", "pearson"])
def test_total_is_between_and_within_put_together(method):
    columns, cluster = clustered_columns(ties=True)
    counts = draw_counts(60, 40, seed=2)
    total, within, between = resampled_decomposition(
        columns[:, :2], cluster, cluster, counts, method=method
    )
    direct = resampled_correlation(columns[:, :2], cluster, counts, method=method)
    np.testing.assert_allclose(total, direct, atol=1e-12)
    for b in range(40):
        rows = np.repeat(columns[:, :2], counts[cluster, b], axis=0)
        part = np.repeat(cluster, counts[cluster, b])
        values = stats.rankdata(rows, axis=0) if method == "spearman" else rows
        frame = pd.DataFrame(values)
        mean = frame.groupby(part).transform("mean").to_numpy()
        assert between[b] == pytest.approx(np.corrcoef(mean.T)[0, 1], abs=1e-10)
        assert within[b] == pytest.approx(np.corrcoef((values - mean).T)[0, 1], abs=1e-10)
        eta = mean.var(axis=0) / values.var(axis=0)
        mixed = np.sqrt(eta.prod()) * between[b] + np.sqrt((1 - eta).prod()) * within[b]
        assert total[b] == pytest.approx(mixed, abs=1e-10)


def test_simpsons_reversal_is_seen_and_parts_must_lie_in_clusters():
    rng = np.random.default_rng(4)
    document = np.repeat(np.arange(30), 20)
    level = rng.normal(size=30)[document] * 3
    within = rng.normal(size=600)
    frame = pd.DataFrame(
        {
            "kl": level - within + 0.1 * rng.normal(size=600),
            "residual_norm": level + within,
            "document": document,
            "sequence": document * 2 + (np.arange(600) % 20 >= 10),
        }
    )
    table = rank_correlation(frame, decompose_by="sequence", n_boot=200).tidy()
    table = table.set_index("component")
    assert table.loc["between", "conf_low"] > 0.8 and table.loc["within", "conf_high"] < -0.5
    assert table["n"].to_dict() == {"total": 600, "within": 600, "between": 60}
    held = (
        rank_correlation(
            frame.assign(z=rng.normal(size=600)),
            "kl ~ residual_norm | z",
            decompose_by="sequence",
            n_boot=50,
        )
        .tidy()
        .set_index("component")
    )
    np.testing.assert_allclose(held["estimate"], table["estimate"], atol=0.05)
    with pytest.raises(ValueError, match="more than one cluster"):
        rank_correlation(frame, decompose_by="document", cluster="sequence", n_boot=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decompose_by": "document", "unit": "layer"}, "needs unit='token'"),
        ({"decompose_by": "document", "method": "kendall"}, "'spearman' or 'pearson'"),
        ({"test": "permutation", "method": "biweight"}, "'spearman' or 'pearson'"),
        ({"interval": "robust", "method": "biweight"}, "analytic standard error"),
        ({"interval": "bootstrap-t", "decompose_by": "document"}, "use 'bca'"),
        ({"test": "jackknife"}, "test='jackknife'"),
        ({"test": "permutation", "n_permutations": 0}, "n_permutations=0"),
        ({"exchange": "tokens"}, "exchange='tokens'"),
        ({"test": "permutation", "exchange": "shift", "sequence": "sequenze"}, "sequenze"),
    ],
)
def test_what_has_no_definition_is_refused_by_name(arguments, message):
    frame = pd.DataFrame({"kl": np.arange(30.0), "residual_norm": 1.0, "document": 0, "layer": 1})
    with pytest.raises(ValueError, match=message):
        rank_correlation(frame, **arguments)


def test_every_circular_shift_is_the_one_written_out():
    rng = np.random.default_rng(5)
    sequence = np.repeat([0, 1, 2], [5, 7, 5])
    x, y = rng.normal(size=(2, 17))
    p_value, permuted = shift_test(x, y, sequence, n_permutations=4000, seed=1)
    every = np.zeros(1)
    for s in range(3):
        a, b = x[sequence == s], y[sequence == s]
        a, b = a - a.mean(), b - b.mean()
        products = [a @ np.roll(b, -k) for k in range(a.size)]
        every = (every[:, None] + np.array(products)[None, :]).ravel()
    # 175 outcomes, 4000 draws: every one is met, and none other
    np.testing.assert_allclose(np.unique(permuted.round(9)), np.unique(every.round(9)))
    observed = sum(
        np.cov(x[sequence == s], y[sequence == s])[0, 1] * (np.sum(sequence == s) - 1)
        for s in range(3)
    )
    exact = np.mean(np.abs(every) >= abs(observed) - 1e-9)
    # Monte Carlo: 4 standard errors of a proportion from 4000 draws
    assert p_value == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 4000) + 1 / 4001)


def test_exchanged_clusters_are_those_written_out():
    rng = np.random.default_rng(6)
    length = np.array([4, 6, 3])
    cluster = np.repeat(np.arange(3), length)
    x, y = rng.normal(size=(2, 13))
    _, permuted = exchange_test(x, y, cluster, n_permutations=300, seed=1)
    blocks = [y[cluster == g] for g in range(3)]
    from itertools import permutations

    every = [
        np.corrcoef(x, np.concatenate([np.resize(blocks[s], length[g]) for g, s in enumerate(p)]))
        for p in permutations(range(3))
    ]
    expected = np.unique(np.round([r[0, 1] for r in every], 9))
    np.testing.assert_allclose(np.unique(permuted.round(9)), expected, atol=2e-9)


def test_permutation_p_values_reach_the_table():
    rng = np.random.default_rng(7)
    document = np.repeat(np.arange(25), 16)
    shared = rng.normal(size=400)
    frame = pd.DataFrame(
        {
            "kl": shared + rng.normal(size=400),
            "residual_norm": shared + rng.normal(size=400),
            "document": document,
            "sequence": document,
            "position": np.tile(np.arange(16), 25),
        }
    )
    choice = {"n_boot": 50, "test": "permutation", "n_permutations": 199}
    by_cluster = rank_correlation(frame, **choice).tidy().iloc[0]
    assert by_cluster["p_value"] == 1 / 200 and by_cluster["test"] == "permutation (clusters)"
    turned = rank_correlation(frame, **choice, exchange="shift").tidy().iloc[0]
    assert turned["p_value"] == 1 / 200 and turned["test"] == "permutation (shift)"
    parts = rank_correlation(frame, **choice, decompose_by="document").tidy()
    parts = parts.set_index("component")
    assert parts.loc["within", "p_value"] == 1 / 200 and parts.loc["between", "p_value"] > 0.01
    shuffled = frame.sample(frac=1, random_state=0)
    again = rank_correlation(shuffled, **choice, exchange="shift").tidy().iloc[0]
    assert again["p_value"] == turned["p_value"]
    given = rank_correlation(frame.assign(z=shared), "kl ~ residual_norm | z", **choice).tidy()
    assert given["p_value"].item() > 0.05


@pytest.mark.parametrize("interval", ["percentile", "basic", "bca", "bootstrap-t", "robust"])
@pytest.mark.parametrize("method", ["spearman", "kendall", "pearson"])
def test_all_intervals_agree_when_there_are_many_clusters(interval, method):
    columns, cluster = clustered_columns(n_clusters=400, size=4)
    frame = pd.DataFrame(columns[:, :2], columns=["kl", "residual_norm"]).assign(document=cluster)
    row = rank_correlation(frame, method=method, interval=interval, n_boot=400).tidy().iloc[0]
    normal = row["estimate"] + np.array([-1.96, 1.96]) * row["std_error"]
    assert row["interval"] == interval and row["converged"]
    # quantiles of 400 resamples lie within about .25 standard errors of those of the normal
    np.testing.assert_allclose(
        row[["conf_low", "conf_high"]].astype(float), normal, atol=0.45 * row["std_error"]
    )


def test_bca_falls_back_by_name_and_counts_degenerate_resamples():
    low, high, used, reason = bootstrap_interval(
        0.5, np.linspace(0.6, 0.9, 99), kind="bca", jackknife=np.array([0.4, 0.5, 0.6])
    )
    assert used == "percentile" and "one side of the estimate" in reason and low < high
    x = np.zeros(40)
    x[:4] = [1.0, 2.0, 3.0, 4.0]
    frame = pd.DataFrame({"kl": x, "residual_norm": x, "document": np.repeat(np.arange(10), 4)})
    row = rank_correlation(frame, n_boot=500).tidy().iloc[0]
    # the one cluster with any variation is missed with probability (9/10)^10 = .35
    assert 120 < row["n_degenerate"] < 230


def test_levels_and_reasons_of_intervals():
    values = np.random.default_rng(0).normal(size=999)
    narrow = bootstrap_interval(0.0, values, level=0.5)
    wide = bootstrap_interval(0.0, values, level=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert bootstrap_interval(0.0, np.array([np.nan]))[3] == "no usable resamples"
    with pytest.raises(ValueError, match="interval='studentized'"):
        bootstrap_interval(0.0, values, kind="studentized")


def test_resampling_within_strata_and_too_many_counts():
    strata = np.array([0, 0, 0, 1, 1])
    counts = draw_counts(5, 200, seed=0, strata=strata)
    assert (counts[:3].sum(axis=0) == 3).all() and (counts[3:].sum(axis=0) == 2).all()
    with pytest.raises(ValueError, match="interval='robust'"):
        draw_counts(10**6, 2000)
