"""Synthesis over models: from correlations to averages, and what it refuses."""

import numpy as np
import pandas as pd
import pytest

from geomstats_lm.statistics import compare_correlations, meta_analysis, rank_correlation
from geomstats_lm.statistics.pooled_effects import generalized_q, pool_effects, tau2_interval


@pytest.fixture(scope="module")
def correlations():
    """Eight models, two layers, whose correlations differ."""
    rng = np.random.default_rng(0)
    parts = []
    for m in range(8):
        for layer in (1, 2):
            document = np.repeat(np.arange(15), 12)
            size = rng.normal(size=180)
            noise = (0.5 + 0.2 * m) * rng.normal(size=180) * layer
            parts.append(
                pd.DataFrame(
                    {
                        "model": f"m{m}",
                        "layer": layer,
                        "document": document,
                        "residual_norm": size,
                        "kl": size + noise,
                    }
                )
            )
    return rank_correlation(pd.concat(parts), n_boot=300)


def test_a_result_is_synthesized_per_layer_on_the_fisher_scale(correlations):
    result = meta_analysis(correlations)
    table = result.tidy()
    assert table["layer"].tolist() == [1, 2] and (table["k"] == 8).all()
    cells = correlations.tidy().query("layer == 1")
    rows = correlations.estimates.index[correlations.estimates["layer"] == 1]
    v = np.arctanh(correlations.replicates.values[rows]).var(axis=1, ddof=1)
    fit = pool_effects(np.arctanh(cells["estimate"].to_numpy()), v)
    assert table["estimate"].iloc[0] == pytest.approx(np.tanh(fit.beta[0]), abs=1e-12)
    assert table["std_error_z"].iloc[0] == pytest.approx(np.sqrt(fit.covariance[0, 0]))
    first = table.iloc[0]
    assert first["pred_low"] < first["conf_low"] < first["estimate"] < first["conf_high"] < 1
    glance = result.glance()
    assert (glance["tau2_low"] <= glance["tau2"]).all()
    assert (glance["tau2"] <= glance["tau2_high"]).all()
    augmented = result.augment()
    np.testing.assert_allclose(augmented.groupby("layer")["weight"].sum(), 100)
    assert "transformed back" in result.summary() and "<table" in result.to_html()


def test_one_model_with_all_the_spread_is_seen_when_left_out():
    frame = pd.DataFrame(
        {"model": list("abcdef"), "estimate": [0.5] * 5 + [0.95], "std_error": 0.01}
    )
    loo = meta_analysis(frame).leave_one_out().set_index("left_out")
    assert loo.loc["f", "tau2"] == 0 and (loo.drop("f")["tau2"] > 0.1).all()
    assert loo.loc["f", "estimate"] == pytest.approx(0.5)


def test_profile_bounds_are_where_the_chi_squared_quantiles_are_met():
    from scipy import stats

    rng = np.random.default_rng(1)
    y, v, x = rng.normal(size=9), rng.uniform(0.05, 0.3, 9), np.ones((9, 1))
    low, high = tau2_interval(y, v, x, 0.9)
    assert generalized_q(low, y, v, x) == pytest.approx(stats.chi2.ppf(0.95, 8), rel=1e-9)
    assert generalized_q(high, y, v, x) == pytest.approx(stats.chi2.ppf(0.05, 8), rel=1e-9)


def models(k=8, **columns):
    rng = np.random.default_rng(k)
    return pd.DataFrame(
        {
            "model": [f"m{i}" for i in range(k)],
            "estimate": rng.uniform(0.4, 0.8, k),
            "std_error": 0.05,
            "architecture": ["ssm", "transformer"] * (k // 2) + ["ssm"] * (k % 2),
            "parameters": np.exp(rng.uniform(16, 21, k)),
            **columns,
        }
    )


def test_meta_regression_names_its_coefficients_and_counts_models():
    with pytest.warns(UserWarning, match="slopes are easily chance"):
        result = meta_analysis(models(), moderators="~ architecture + log(parameters)")
    table = result.tidy()
    assert table["term"].tolist() == ["Intercept", "architecture[T.transformer]", "log(parameters)"]
    assert table["pred_low"].isna().all() and "on that scale" in result.notes[0]
    with pytest.raises(ValueError, match=r"at least 5 estimates; there are 4"):
        meta_analysis(models(4), moderators="~ architecture + log(parameters)")
    with pytest.raises(ValueError, match="not independent"):
        meta_analysis(models(parameters=1.0), moderators="~ architecture + parameters")
    missing = models()
    missing.loc[3, "parameters"] = np.nan
    with pytest.raises(ValueError, match=r"no value for \['m3'\]"):
        meta_analysis(missing, moderators="~ log(parameters)")


def test_layers_of_one_model_are_refused_unless_their_dependence_is_allowed_for(correlations):
    with pytest.raises(ValueError, match="robust='model'"):
        meta_analysis(correlations, by=())
    robust = meta_analysis(correlations, by=(), robust="model").tidy().iloc[0]
    assert robust["df"] == 7 and robust["k"] == 16
    with (
        pytest.warns(UserWarning, match="slopes"),
        pytest.raises(ValueError, match="has 2 clusters: at least 3"),
    ):
        meta_analysis(models(), moderators="~ parameters", robust="architecture")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "ML"}, "method='ML'"),
        ({"transform": "logit"}, "transform='logit'"),
        ({"over": "modle"}, "Did you mean 'model'"),
        ({"level": 0}, "level=0"),
        ({"adjust": "none"}, "adjust='none'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        meta_analysis(models(), **arguments)


def test_other_tables_are_refused():
    with pytest.raises(TypeError, match="expected a result or a frame"):
        meta_analysis([0.1, 0.2])
    with pytest.raises(ValueError, match="'std_error' is not in the data"):
        meta_analysis(models().drop(columns="std_error"))
    with pytest.raises(ValueError, match="transform=None"):
        meta_analysis(models(estimate=[2.0] * 8))


def test_what_cannot_be_used_is_left_out_and_counted():
    frame = models()
    frame.loc[0, "std_error"], frame.loc[1, "estimate"], frame.loc[2, "estimate"] = 0.0, np.nan, 1.0
    result = meta_analysis(frame)
    assert result.tidy()["k"].item() == 5 and result.glance()["n_left_out"].item() == 3
    alone = meta_analysis(frame.iloc[:4]).tidy().iloc[0]
    assert (
        np.isnan(alone["estimate"])
        and alone["reason"] == "1 usable estimates: at least 2 are needed"
    )


def test_subgroups_need_two_models_each():
    result = meta_analysis(models())
    table = result.subgroups("architecture")
    assert (table["k"] == 4).all() and (table["q_df"] == 1).all()
    with pytest.raises(ValueError, match="has 1 study"):
        result.subgroups("model")
    with pytest.raises(ValueError, match="Did you mean 'architecture'"):
        result.subgroups("architectur")


def test_differences_between_layers_use_the_shared_resamples(correlations):
    table = compare_correlations(correlations, over="layer", reference=2).tidy()
    assert len(table) == 8 and (table["first"] == 1).all() and (table["second"] == 2).all()
    row = table.iloc[0]
    assert row["estimate"] == pytest.approx(row["estimate_first"] - row["estimate_second"])
    pair = correlations.replicates.values[:2]
    assert row["std_error"] == pytest.approx(np.std(pair[0] - pair[1], ddof=1))
    assert len(compare_correlations(correlations, over="layer", pairs=[(2, 1)]).tidy()) == 8


def test_real_against_control_row_by_row():
    rng = np.random.default_rng(2)
    size, noise, other = rng.normal(size=(3, 400))
    frame = pd.DataFrame({"document": np.repeat(np.arange(20), 20), "residual_norm": size})
    frame = frame.assign(kl=size + 0.3 * noise, kl_control=size + 2.0 * other)
    real = rank_correlation(frame, "kl ~ residual_norm", n_boot=200)
    control = rank_correlation(frame, "kl_control ~ residual_norm", n_boot=200)
    row = compare_correlations(real, control).tidy().iloc[0]
    assert row["conf_low"] > 0 and row["p_value"] < 0.01
    itself = compare_correlations(real, real).tidy().iloc[0]
    assert itself["estimate"] == itself["conf_low"] == itself["conf_high"] == 0
    with pytest.raises(ValueError, match="same resamples"):
        compare_correlations(
            real, rank_correlation(frame, "kl_control ~ residual_norm", n_boot=200, seed=1)
        )
    fewer = frame[frame["document"] > 2]
    with pytest.raises(ValueError, match="same resamples"):
        compare_correlations(
            real, rank_correlation(fewer, "kl_control ~ residual_norm", n_boot=200)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a second result, or over="),
        ({"over": "layr"}, "Did you mean 'layer'"),
        ({"over": "layer", "reference": 7}, r"\['7'\] are not labels"),
        ({"over": "layer", "interval": "bca"}, "interval='bca'"),
    ],
)
def test_comparisons_refused(correlations, arguments, message):
    with pytest.raises(ValueError, match=message):
        compare_correlations(correlations, **arguments)
