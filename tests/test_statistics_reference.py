"""Agreement with R, number by number; `reference/make_reference.R` made the numbers.

Tolerances: 1e-6 relative (six digits) wherever both sides solve the same equations; 1e-9 where
there is nothing to iterate. Deviations of random effects: 5e-5, and standard errors 2e-5, since a
likelihood that is flat at its summit fixes them to the square root of the precision of its value
(measured: 1e-7, but for crossed effects by maximum likelihood, 2e-5).
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.stats.meta_analysis as sm_meta
from scipy import stats

from geomstats_lm.statistics import (
    adjust_p_values,
    meta_analysis,
    mixed_model,
    ols,
    quantile_regression,
)
from geomstats_lm.statistics.association import resampled_correlation
from geomstats_lm.statistics.pooled_effects import METHODS, pool_effects
from geomstats_lm.statistics.ranks import resampled_spearman
from geomstats_lm.statistics.resampling import bootstrap_interval

R = json.loads((Path(__file__).parent / "reference" / "r_reference.json").read_text())
ONE = np.ones((1, 1), np.int16)

# every case that the package promises to agree with R on
CASES = {
    "correlation": [
        *("spearman", "kendall", "pearson", "spearman_tied", "kendall_tied"),
        *("spearman_partial", "spearman_semipartial"),
    ],
    "bootstrap": ["t", "percentile", "basic", "bca", "basic_fisher_z", "bootstrap_t"],
    "meta": [
        "FE_z",
        "FE_z_moderators",
        *(
            f"{method}_{test}{moderators}"
            for method in ("DL", "PM", "REML")
            for test in ("z", "knha")
            for moderators in ("", "_moderators")
        ),
        *("robust", "robust_moderators", "leave_one_out", "subgroups", "no_heterogeneity"),
    ],
    "ols": ["beta", "classical_se", "cr1_se", "cr2_se", "cr2_df", "cr2_p", "r2", "sigma"],
    "quantile": ["quantiles", "beta"],
    "mixed": [
        f"{name}{likelihood}"
        for name in (
            *("intercept", "slope", "nested", "nested_slope"),
            *("uncorrelated", "slash", "crossed"),
        )
        for likelihood in ("", "_ml")
    ],
    "adjust": ["BH", "BY", "holm", "hochberg", "hommel", "bonferroni"],
}


def test_every_listed_case_has_a_reference_and_every_reference_is_listed():
    inputs = {"data", "counts", "t0", "jackknife", "variance_t0", "variance_t", "p"}
    assert set(CASES) == set(R) - {"versions"}
    for group, cases in CASES.items():
        assert set(cases) == set(R[group]) - inputs, group
        for case in cases:
            assert R[group][case] not in (None, [], {}), f"{group}: {case}"
    assert {"R", "metafor", "lme4", "clubSandwich"} <= set(R["versions"])


@pytest.mark.parametrize("case", CASES["correlation"])
def test_correlations(case):
    data = {name: np.array(values, float) for name, values in R["correlation"]["data"].items()}
    tied = case.endswith("_tied")
    columns = [data["tied_y"], data["tied_x"]] if tied else [data["y"], data["x"]]
    if case.endswith("partial"):
        columns += [data["z1"], data["z2"]]
    found = resampled_correlation(
        np.column_stack(columns),
        np.zeros(60, int),
        ONE,
        method=case.split("_")[0],
        semipartial=case.endswith("semipartial"),
    )[0]
    assert found == pytest.approx(R["correlation"][case], rel=1e-9)


def test_bootstrap_replicates_on_the_same_resamples():
    boot = R["bootstrap"]
    cluster = np.array(boot["data"]["cluster"]) - 1
    x, y = np.array(boot["data"]["x"]), np.array(boot["data"]["y"])
    found = resampled_spearman(x, y, cluster, np.array(boot["counts"], np.int16))
    np.testing.assert_allclose(found, boot["t"], rtol=1e-9)


@pytest.mark.parametrize("case", CASES["bootstrap"][1:])
def test_bootstrap_intervals(case):
    boot = R["bootstrap"]
    kind = {"basic_fisher_z": "basic", "bootstrap_t": "bootstrap-t"}.get(case, case)
    low, high, used, _ = bootstrap_interval(
        boot["t0"],
        np.array(boot["t"]),
        kind=kind,
        jackknife=np.array(boot["jackknife"]),
        std_error=np.sqrt(boot["variance_t0"]),
        replicate_std_errors=np.sqrt(boot["variance_t"]),
        fisher_z=case == "basic_fisher_z",
    )
    assert used == kind
    np.testing.assert_allclose([low, high], boot[case], rtol=1e-6)


def studies():
    frame = pd.DataFrame(R["meta"]["data"]).rename(columns={"yi": "estimate"})
    return frame.assign(std_error=np.sqrt(frame["vi"]), model=[f"m{i}" for i in range(len(frame))])


def synthesis(case, **choice):
    method, test = case.split("_")[:2]
    moderators = "~ architecture + log(parameters)" if case.endswith("moderators") else None
    arguments = {"method": method, "knapp_hartung": test == "knha", "moderators": moderators}
    return meta_analysis(studies(), transform=None, **{**arguments, **choice})


def agree(found, expected, **tolerance):
    np.testing.assert_allclose(np.atleast_1d(found), np.atleast_1d(expected), **tolerance)


@pytest.mark.filterwarnings("ignore:.*moderator coefficients")
@pytest.mark.parametrize("case", [case for case in CASES["meta"] if case.split("_")[0] in METHODS])
def test_meta_analysis(case):
    expected = R["meta"][case]
    result = synthesis(case)
    table, fit = result.tidy(), result.glance().iloc[0]
    for column, name in (
        ("estimate", "beta"),
        ("std_error", "se"),
        ("p_value", "p"),
        ("conf_low", "low"),
        ("conf_high", "high"),
    ):
        agree(table[column], expected[name], rtol=1e-6)
    agree(fit["tau2"], expected["tau2"], rtol=1e-6, atol=1e-12)
    for name in ("i2", "h2", "q"):
        # metafor reports H^2 and I^2 of a fixed-effect fit from Q; ours speak of tau^2, which is 0
        if name == "q" or not case.startswith("FE"):
            agree(fit[name], expected[name], rtol=1e-6)
    agree(fit["q_p_value"], expected["q_p"], rtol=1e-6)
    if case.endswith("moderators"):
        agree(fit["qm"], expected["qm"], rtol=1e-6)
        agree(fit["qm_p_value"], expected["qm_p"], rtol=1e-6)
    if not case.startswith("FE"):
        # metafor solves for the bounds to 1e-4 by default
        agree(fit[["tau2_low", "tau2_high"]].astype(float), expected["tau2_interval"], atol=2e-4)
        if not case.endswith("moderators"):
            agree(table[["pred_low", "pred_high"]].iloc[0], expected["prediction"], rtol=1e-6)


def test_meta_analysis_without_heterogeneity():
    expected = R["meta"]["no_heterogeneity"]
    fit = pool_effects(np.array(expected["yi"]), np.array(expected["vi"]))
    assert fit.tau2 == expected["tau2"] == 0
    agree(fit.beta, expected["beta"], rtol=1e-9)
    agree(np.sqrt(fit.covariance[0]), expected["se"], rtol=1e-6)
    agree(fit.tau2_low, 0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*moderator coefficients")
@pytest.mark.parametrize("moderators", [None, "~ architecture"], ids=["average", "moderators"])
def test_robust_variance_of_dependent_estimates(moderators):
    expected = R["meta"]["robust_moderators" if moderators else "robust"]
    result = meta_analysis(studies(), transform=None, moderators=moderators, robust="family")
    table = result.tidy()
    agree(table["estimate"], expected["beta"], rtol=1e-6)
    agree(table["std_error"], expected["se"], rtol=1e-6)
    agree(table["p_value"], expected["p"], rtol=1e-6)
    assert set(table["df"]) == {expected["df"]} or set(table["df"]) == set(
        np.atleast_1d(expected["df"])
    )


def test_leave_one_out_and_subgroups():
    result = synthesis("REML_knha")
    loo = result.leave_one_out()
    for column, name in (("estimate", "beta"), ("std_error", "se"), ("tau2", "tau2")):
        agree(loo[column], R["meta"]["leave_one_out"][name], rtol=1e-6)
    groups = result.subgroups("architecture")
    assert groups["architecture"].tolist() == ["ssm", "transformer"]
    for column, name in (("estimate", "beta"), ("std_error", "se"), ("tau2", "tau2")):
        agree(groups[column], R["meta"]["subgroups"][name], rtol=1e-6)
    agree(groups["q_between"].iloc[0], R["meta"]["subgroups"]["q"], rtol=1e-6)
    agree(groups["q_p_value"].iloc[0], R["meta"]["subgroups"]["p"], rtol=1e-6)


@pytest.mark.parametrize("method", ["DL", "PM"])
def test_statsmodels_agrees_where_it_has_the_method(method):
    data = R["meta"]["data"]
    y, v = np.array(data["yi"]), np.array(data["vi"])
    theirs = sm_meta.combine_effects(y, v, method_re={"DL": "chi2", "PM": "iterated"}[method])
    ours = pool_effects(y, v, method=method)
    assert ours.tau2 == pytest.approx(theirs.tau2, rel=1e-4)  # its iteration stops at 1e-5
    assert ours.q == pytest.approx(theirs.q, rel=1e-9)
    assert np.sqrt(ours.covariance[0, 0]) == pytest.approx(theirs.sd_eff_w_re_hksj, rel=1e-4)


def test_least_squares():
    frame, expected = pd.DataFrame(R["ols"]["data"]), R["ols"]
    formula = "y ~ x * kind + level"
    # R writes the interaction last, as formulaic does
    plain = ols(formula, frame, cluster=None)
    order = ["Intercept", "x", "kind[T.b]", "kind[T.c]", "level", "x:kind[T.b]", "x:kind[T.c]"]
    table = plain.tidy().set_index("term").loc[order]
    agree(table["estimate"], expected["beta"], rtol=1e-9)
    agree(table["std_error"], expected["classical_se"], rtol=1e-9)
    agree(plain.glance()["r2"], expected["r2"], rtol=1e-9)
    agree(plain.glance()["sigma"], expected["sigma"], rtol=1e-9)
    one = ols(formula, frame, cluster="g", vcov="CR1").tidy().set_index("term").loc[order]
    agree(one["std_error"], expected["cr1_se"], rtol=1e-9)
    two = ols(formula, frame, cluster="g").tidy().set_index("term").loc[order]
    agree(two["std_error"], expected["cr2_se"], rtol=1e-8)
    agree(two["df"], expected["cr2_df"], rtol=1e-6)
    agree(two["p_value"], expected["cr2_p"], rtol=1e-6)


def test_quantile_regression():
    frame = pd.DataFrame(R["ols"]["data"])
    quantiles = R["quantile"]["quantiles"]
    result = quantile_regression("y ~ x + level", frame, quantiles=quantiles, cluster=None)
    found = result.tidy().pivot(index="quantile", columns="term", values="estimate")
    agree(found[["Intercept", "x", "level"]], R["quantile"]["beta"], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:a random term has 5 groups")
@pytest.mark.parametrize("case", CASES["mixed"])
def test_mixed_models(case):
    expected = R["mixed"][case]
    frame = pd.DataFrame(R["mixed"]["data"])
    result = mixed_model(expected["formula"], frame, reml=expected["reml"])
    table, fit = result.tidy(), result.glance().iloc[0]
    assert fit["converged"], fit["reason"]
    agree(fit["log_likelihood"], expected["log_likelihood"], rtol=1e-9)
    fixed = table[table["effect"] == "fixed"]
    agree(fixed["estimate"], expected["beta"], rtol=1e-6)
    agree(fixed["std_error"], expected["se"], rtol=2e-5)
    agree(fit["sigma"], expected["sigma"], rtol=1e-6)
    ours = {
        (row.group, row.term): row.estimate
        for row in table.itertuples()
        if row.effect == "ran_pars"
    }
    for group, first, second, value in zip(
        expected["group"], expected["first"], expected["second"], expected["value"]
    ):
        if group == "Residual":
            continue
        # lme4 numbers the terms of ||, and writes document:model for model/document
        name = {"model.1": "model", "model.document": "model:document"}.get(group, group)
        name = "model:document" if name == "document:model" else name
        term = f"sd__{first}" if second is None else f"cor__{first}.{second}"
        assert ours[name, term] == pytest.approx(value, rel=5e-5), (name, term)


@pytest.mark.parametrize("case", CASES["adjust"])
def test_adjusted_p_values(case):
    ours = {
        "BH": "fdr_bh",
        "BY": "fdr_by",
        "hochberg": "simes-hochberg",
    }.get(case, case)
    p = np.array(R["adjust"]["p"], float)
    expected = np.array(R["adjust"][case], float)
    np.testing.assert_allclose(adjust_p_values(p, ours), expected, rtol=1e-9)


def test_z_based_prediction_uses_the_normal_distribution():
    fit = synthesis("REML_z").tidy().iloc[0]
    assert fit["df"] == np.inf
    assert stats.norm.ppf(0.975) * fit["std_error"] == pytest.approx(
        fit["conf_high"] - fit["estimate"]
    )
