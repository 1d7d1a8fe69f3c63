"""Regressions, mixed models, and the bootstrap of any statistic."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from geomstats_lm.statistics import (
    cluster_bootstrap,
    mixed_model,
    ols,
    quantile_regression,
    rank_correlation,
)
from geomstats_lm.statistics.cluster_robust import cluster_robust
from geomstats_lm.statistics.random_effects import split_formula
from geomstats_lm.statistics.regression import exact_quantile_fit


def clustered_frame(seed=0, n_clusters=20, size=10):
    rng = np.random.default_rng(seed)
    document = np.repeat(np.arange(n_clusters), size)
    n = document.size
    frame = pd.DataFrame({"document": document, "x": rng.normal(size=n), "z": rng.normal(size=n)})
    effect = rng.normal(size=n_clusters)[document]
    return frame.assign(y=1 + 2 * frame["x"] + effect + rng.normal(size=n))


def test_cr2_is_its_formula_with_the_roots_written_out():
    frame = clustered_frame(n_clusters=6)
    x = np.column_stack([np.ones(60), frame["x"], frame["document"] % 2])
    beta = np.linalg.lstsq(x, frame["y"].to_numpy())[0]
    residual = frame["y"].to_numpy() - x @ beta
    bread = np.linalg.inv(x.T @ x)
    hat = x @ bread @ x.T
    meat, projected = np.zeros((3, 3)), np.zeros((6, 60, 3))
    for g in range(6):
        rows = np.flatnonzero(frame["document"] == g)
        values, vectors = np.linalg.eigh(np.eye(10) - hat[np.ix_(rows, rows)])
        root = vectors @ np.diag(values**-0.5) @ vectors.T
        score = x[rows].T @ root @ residual[rows]
        meat += np.outer(score, score)
        projected[g][rows] = root @ x[rows] @ bread
    covariance, df = cluster_robust(x, residual, frame["document"].to_numpy())
    np.testing.assert_allclose(covariance, bread @ meat @ bread, rtol=1e-9)
    for j in range(3):
        p = projected[:, :, j]
        b = p @ (np.eye(60) - hat) @ p.T
        assert df[j] == pytest.approx(np.trace(b) ** 2 / np.sum(b**2), rel=1e-9)


def test_clustered_errors_are_larger_where_the_predictor_is_shared():
    frame = clustered_frame().assign(level=lambda f: np.sin(f["document"]))
    clustered = ols("y ~ level", frame).tidy().set_index("term")
    classical = ols("y ~ level", frame, cluster=None).tidy().set_index("term")
    assert clustered.loc["level", "std_error"] > 1.1 * classical.loc["level", "std_error"]
    assert clustered.loc["level", "df"] < 20 < classical.loc["level", "df"]


def test_regressions_take_datasets_and_leave_out_flagged_tokens():
    frame = clustered_frame()
    flagged = frame.assign(is_special=np.arange(200) % 10 == 0)
    data = xr.Dataset(
        {name: ("token", flagged[name].to_numpy()) for name in ("x", "y")},
        coords={name: ("token", flagged[name].to_numpy()) for name in ("document", "is_special")},
    )
    found = ols("y ~ x", data)
    assert found.glance()["n"].item() == 180 and found.glance()["n_left_out"].item() == 20
    kept = ols("y ~ x", frame[~flagged["is_special"]])
    pd.testing.assert_frame_equal(found.tidy(), kept.tidy())
    augmented = found.augment()
    np.testing.assert_allclose(augmented["fitted"] + augmented["residual"], augmented["y"])


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("y ~ xx", "Did you mean 'x'"),
        ("y", "not of the form"),
        ("y ~ x + I(2 * x)", "not independent"),
        ("C(document) ~ x", "a factor, not one number"),
        ("y ~ unknown(x)", "cannot be evaluated"),
    ],
)
def test_regressions_refuse(formula, message):
    with pytest.raises(ValueError, match=message):
        ols(formula, clustered_frame())


def test_missing_and_infinite_rows_are_counted():
    frame = clustered_frame()
    frame.loc[0, "x"], frame.loc[1, "y"] = np.nan, 0.0
    frame["y"] = frame["y"].abs()
    result = ols("np.log(y) ~ x", frame)
    assert result.glance()["n_missing"].item() == 2 and result.glance()["n"].item() == 198
    with pytest.raises(ValueError, match="vcov='HC3'"):
        ols("y ~ x", frame, vcov="HC3")
    with pytest.raises(ValueError, match="has 1 label"):
        ols("y ~ x", frame.assign(document=0))
    with pytest.raises(ValueError, match="2 complete rows for 2 coefficients"):
        ols("y ~ x", frame.iloc[2:4])


def test_quantile_fits_are_vertices_no_neighbour_improves():
    from scipy.optimize import linprog

    frame = clustered_frame(seed=3)
    x = np.column_stack([np.ones(200), frame["x"], frame["z"]])
    y = frame["y"].to_numpy()
    for q in (0.1, 0.5, 0.8):
        cost = np.r_[np.zeros(6), np.full(200, q), np.full(200, 1 - q)]
        equal = np.hstack([x, -x, np.eye(200), -np.eye(200)])
        exact = linprog(cost, A_eq=equal, b_eq=y, method="highs")
        residual = y - x @ exact_quantile_fit(y, x, q)
        loss = np.sum(residual * (q - (residual < 0)))
        assert loss == pytest.approx(exact.fun, rel=1e-9)


def test_quantile_regression_draws_documents():
    frame = clustered_frame()
    table = quantile_regression("y ~ x", frame, quantiles=(0.25, 0.75), n_boot=60).tidy()
    assert table["quantile"].tolist() == [0.25, 0.25, 0.75, 0.75]
    slopes = table[table["term"] == "x"]
    assert ((slopes["conf_low"] < 2) & (slopes["conf_high"] > 2)).all()
    kernel = quantile_regression("y ~ x", frame, cluster=None).tidy()
    assert kernel["estimate"].iloc[1] == pytest.approx(2, abs=0.5)
    with pytest.raises(ValueError, match=r"quantiles=\(1.5,\)"):
        quantile_regression("y ~ x", frame, quantiles=(1.5,))


def test_random_terms_are_read_as_lme4_reads_them():
    def terms(formula):
        return [str(term) for term in split_formula(formula)[1]]

    assert terms("y ~ x + (x | a/b)") == ["(x | a)", "(x | a:b)"]
    assert terms("y ~ (1|a:b) + (0 + x || c)") == ["(1 | a:b)", "(0 + x || c)"]
    assert split_formula("y ~ (1|a)")[0] == "y ~ 1"
    for formula, message in (
        ("y ~ x", "use ols"),
        ("y ~ x + 1 | a", "must stand in brackets"),
        ("y ~ (1 | a | b)", "not of the form"),
        ("y", "not of the form"),
    ):
        with pytest.raises(ValueError, match=message):
            split_formula(formula)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("y ~ x + (1 | model) + (1 + x | model:document)", "correlated nested slopes"),
        ("y ~ x + (1 + x | model) + (1 | token)", "crossed"),
        ("y ~ x + (1 + x | model) + (1 + z | model)", "only one correlated term"),
        ("y ~ x + (1 | modle)", "Did you mean 'model'"),
    ],
)
def test_random_effects_that_cannot_be_fitted_are_refused_by_name(formula, message):
    frame = clustered_frame().assign(
        model=lambda f: f["document"] // 4, token=lambda f: f.index % 10
    )
    with pytest.raises(ValueError, match=message):
        mixed_model(formula, frame)


def test_uncorrelated_nested_slopes_are_fitted_and_factors_interact():
    rng = np.random.default_rng(5)
    frame = clustered_frame(n_clusters=48, size=8).assign(
        model=lambda f: f["document"] // 4,
        architecture=lambda f: np.where(f["model"] % 2, "a", "b"),
    )
    slopes = rng.normal(size=48)[frame["document"]]
    frame["y"] += slopes * frame["x"]
    result = mixed_model(
        "y ~ x * architecture + (1 | model) + (1 + x || model:document)", frame, reml=False
    )
    table = result.tidy()
    random = table[table["effect"] == "ran_pars"].set_index(["group", "term"])["estimate"]
    assert random["model:document", "sd__x"] == pytest.approx(1.0, abs=0.35)
    assert "x:architecture[T.b]" in table["term"].tolist()
    augmented = result.augment()
    np.testing.assert_allclose(augmented["fitted"] + augmented["residual"], augmented["y"])
    assert augmented["residual"].std() < 1.1


def test_a_variance_on_the_boundary_is_said():
    rng = np.random.default_rng(6)
    frame = pd.DataFrame({"model": np.repeat(np.arange(12), 20), "x": rng.normal(size=240)})
    # more alike between models than chance: no variance between them can explain that
    noise = rng.normal(size=(12, 20))
    frame["y"] = frame["x"] + (noise - noise.mean(axis=1, keepdims=True)).ravel()
    fit = mixed_model("y ~ x + (1 | model)", frame).glance().iloc[0]
    assert fit["singular"] and "boundary" in fit["reason"]
    with pytest.raises(ValueError, match="optimizers="):
        mixed_model("y ~ x + (1 | model)", frame, optimizers=("newton-ish",))


def test_few_groups_are_warned_of():
    frame = clustered_frame(n_clusters=4)
    with pytest.warns(UserWarning, match="4 groups"):
        mixed_model("y ~ x + (1 | document)", frame)


def spearman(frame):
    return stats.spearmanr(frame["x"], frame["y"]).statistic


def test_the_general_bootstrap_gives_what_the_kernel_gives():
    frame = clustered_frame()
    general = cluster_bootstrap(spearman, frame, n_boot=150, interval="bca")
    kernel = rank_correlation(frame, "y ~ x", n_boot=150, interval="bca")
    np.testing.assert_allclose(general.replicates[0], kernel.replicates[0], atol=1e-12)
    for name in ("estimate", "std_error", "conf_low", "conf_high"):
        assert general.tidy()[name].item() == pytest.approx(kernel.tidy()[name].item(), abs=1e-12)


def test_statistics_may_return_series_dicts_arrays_and_take_datasets():
    frame = clustered_frame()
    data = xr.Dataset(
        {"x": ("token", frame["x"])}, coords={"document": ("token", frame["document"])}
    )
    named = cluster_bootstrap(
        lambda d: {"mean": d["x"].mean(), "max": d["x"].max()}, data, n_boot=40
    )
    assert named.tidy()["term"].tolist() == ["mean", "max"]
    series = cluster_bootstrap(lambda f: f[["x", "y"]].mean(), frame, n_boot=40)
    assert series.replicates.sizes == {"term": 2, "boot": 40}
    array = cluster_bootstrap(lambda f: f["x"].quantile([0.1, 0.9]).to_numpy(), frame, n_boot=40)
    assert array.tidy()["term"].tolist() == [0, 1]
    with pytest.raises(TypeError, match=r"got shape \(200, 2\)"):
        cluster_bootstrap(lambda f: f[["x", "y"]].to_numpy(), frame)


def test_copies_of_a_cluster_stay_apart():
    frame = clustered_frame()
    result = cluster_bootstrap(lambda f: f["document"].nunique(), frame, n_boot=30)
    assert (result.replicates == 20).all()


def test_degenerate_resamples_are_counted_and_strata_kept():
    frame = clustered_frame(n_clusters=12).assign(half=lambda f: f["document"] % 2)
    rare = frame["document"] == 3

    def needs_the_rare(part):
        chosen = part["x"][part["rare"]]
        return 1 / len(chosen) if len(chosen) else 1 / 0

    result = cluster_bootstrap(needs_the_rare, frame.assign(rare=rare), n_boot=200)
    # missed with probability (11/12)^12 = .35
    assert 40 < result.tidy()["n_degenerate"].item() < 105
    balanced = cluster_bootstrap(lambda f: f["half"].mean(), frame, stratify="half", n_boot=30)
    assert (balanced.replicates == 0.5).all()
    with pytest.raises(ValueError, match="cuts clusters"):
        cluster_bootstrap(spearman, frame.assign(half=np.arange(120) % 2), stratify="half")


def test_studentized_bootstrap_with_and_without_a_formula():
    frame = clustered_frame(n_clusters=30, size=4)

    def error(part):
        return part.groupby("document")["y"].mean().std(ddof=1) / np.sqrt(30)

    given = (
        cluster_bootstrap(
            lambda f: f["y"].mean(), frame, interval="bootstrap-t", std_error=error, n_boot=300
        )
        .tidy()
        .iloc[0]
    )
    nested = (
        cluster_bootstrap(lambda f: f["y"].mean(), frame, interval="bootstrap-t", n_boot=100)
        .tidy()
        .iloc[0]
    )
    # nested standard errors come from 25 resamples each, and widen the interval a little
    assert given["interval"] == nested["interval"] == "bootstrap-t"
    assert nested["conf_high"] - nested["conf_low"] == pytest.approx(
        given["conf_high"] - given["conf_low"], rel=0.35
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": "dokument"}, "Did you mean 'document'"),
        ({"interval": "robust"}, "interval='robust'"),
        ({"stratify": "haf"}, "haf"),
    ],
)
def test_bootstraps_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster_bootstrap(spearman, clustered_frame(), **arguments)
