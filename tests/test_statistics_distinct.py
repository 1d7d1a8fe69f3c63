"""Observed against what the method forces: superiority, equivalence, and adjusting the p-values."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from geomstats_lm.statistics import adjust, test_distinct


def forced(effect, n=600):
    rng = np.random.default_rng(8)
    null = rng.uniform(1, 2, n)
    return pd.DataFrame(
        {
            "document": np.repeat(np.arange(30), n // 30),
            "null": null,
            "observed": null * (1 + effect) + 0.1 * rng.normal(size=n),
        }
    )


@pytest.mark.parametrize("effect", ["difference", "ratio"])
@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.2, "larger"), (-0.2, "smaller"), (0.0, "equivalent")]
)
@pytest.mark.parametrize("interval", ["percentile", "bca", "basic"])
def test_distinct_larger_smaller_or_equivalent(effect, shift, verdict, interval):
    margin = 1.1 if effect == "ratio" else 0.1
    row = (
        test_distinct(
            forced(shift),
            "observed",
            "null",
            effect=effect,
            margin=margin,
            interval=interval,
            n_boot=300,
        )
        .tidy()
        .iloc[0]
    )
    assert row["verdict"] == verdict
    none = 1.0 if effect == "ratio" else 0.0
    expected = 1 + shift if effect == "ratio" else 1.5 * shift
    assert row["estimate"] == pytest.approx(expected, abs=0.03)
    if verdict == "equivalent":
        # a difference may be sure and yet too small to matter
        smallest = 1 / margin if effect == "ratio" else -margin
        assert smallest < row["conf_low"] < row["conf_high"] < margin
    else:
        assert not row["conf_low"] <= none <= row["conf_high"]


def test_too_little_data_is_undecided_not_equivalent():
    few = forced(0.0, n=60)
    few["observed"] += np.random.default_rng(0).normal(size=60)
    assert (
        test_distinct(few, "observed", "null", margin=0.05).tidy()["verdict"].item() == "undecided"
    )


def test_equivalence_is_two_one_sided_tests():
    row = test_distinct(forced(0.02), "observed", "null", margin=0.05, n_boot=500).tidy().iloc[0]
    t = (0.05 - abs(row["estimate"])) / row["std_error"]
    assert row["p_equivalent"] == pytest.approx(stats.t.sf(t, 29))


def test_nulls_may_be_numbers_or_have_draws_of_their_own():
    rng = np.random.default_rng(9)
    data = xr.Dataset(
        {
            "energy": (("layer", "token"), rng.uniform(0.2, 0.4, (2, 200))),
            "energy_null": (("draw", "layer", "token"), rng.uniform(0.0, 0.2, (5, 2, 200))),
        },
        coords={"layer": [1, 2], "document": ("token", np.repeat(np.arange(20), 10))},
    )
    number = test_distinct(data, "energy", 0.1, n_boot=100).tidy()
    assert (number["verdict"] == "larger").all() and np.allclose(number["mean_null"], 0.1)
    drawn = test_distinct(data, "energy", "energy_null", n_boot=100).tidy()
    assert len(drawn) == 2 and (drawn["n"] == 200).all()
    expected = float(data["energy_null"].sel(layer=1).mean())
    assert drawn["mean_null"].iloc[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": -1.0}, "margin=-1.0 must be larger than 0"),
        ({"margin": 0.9, "effect": "ratio"}, "larger than 1 for a ratio"),
        ({"effect": "quotient"}, "effect='quotient'"),
        ({"interval": "robust"}, "interval='robust'"),
        ({"by": ("layr",)}, "layr"),
    ],
)
def test_null_tests_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        test_distinct(forced(0.0), "observed", "null", **arguments)


def test_negative_means_have_no_ratio():
    row = test_distinct(forced(-2.0), "observed", "null", effect="ratio", n_boot=50).tidy().iloc[0]
    assert np.isnan(row["estimate"]) and row["reason"] == "a ratio needs positive means"


def test_adjusting_labelled_p_values_over_some_dims():
    rng = np.random.default_rng(10)
    p = xr.DataArray(rng.random((3, 4)), dims=("model", "layer"), coords={"model": list("abc")})
    p[1, 2] = np.nan
    by_model = adjust(p, over=["layer"])
    for m in range(3):
        known = p[m].dropna("layer")
        np.testing.assert_allclose(
            by_model[m].dropna("layer"), stats.false_discovery_control(known), rtol=1e-12
        )
    assert np.isnan(by_model[1, 2]) and by_model.dims == p.dims
    with pytest.raises(ValueError, match="are not among"):
        adjust(p, over=["head"])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        adjust(p + 1)
