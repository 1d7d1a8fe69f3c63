"""Held-out error over settings and over the size of the reference."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from geomstats_lm.choosing import cross_validate, fit_power_law, reference_curve
from geomstats_lm.decompose import decompose
from geomstats_lm.layer_maps import RIDGES
from tests.synthetic import activations


@pytest.fixture(scope="module")
def data():
    return activations(n_layers=2, dim=8, documents=24, noise=0.3).load()


@pytest.fixture(scope="module")
def chosen(data):
    labels = ["affine", "low_rank[ridge=0.1]", "mean", "affine[scope=global]"]
    return cross_validate(data, labels, k=(4, 16), ridge=(0.01, 1.0), rank=(2, 8), windows=None)


def test_every_setting_of_every_class_is_tried_once(chosen):
    table = chosen.tidy()
    per_layer = table[table.layer == 1]
    count = per_layer.class_name.value_counts()
    # low_rank with rank 8 needs more than 4 neighbours, so one of four is left out
    assert count.to_dict() == {
        "affine": 4, "low_rank[ridge=0.1]": 3, "affine[scope=global]": 2, "mean": 1
    }  # fmt: skip
    assert set(per_layer[per_layer.class_name == "affine"].k) == {4, 16}
    assert per_layer.function_class.is_unique


def test_errors_and_standard_errors_are_those_of_a_decomposition(data, chosen):
    row = chosen.tidy().set_index(["layer", "function_class"]).loc[(2, "affine[k=4,ridge=0.01]")]
    parts = decompose(data, ["affine[ridge=0.01]"], k=4, tokens="reference", layers=[2]).compute()
    size = np.linalg.norm(parts["update"].values[0, 0], axis=1)
    left = np.linalg.norm(parts["residual"].values[0, 0, 0], axis=1)
    usable = parts.position.values > 0
    error = (left / size)[usable]
    assert row.estimate == pytest.approx(error.mean(), rel=1e-5)
    assert row.n == usable.sum() and row.n_clusters == 17
    sums = pd.Series(error - error.mean()).groupby(parts.document.values[usable]).sum()
    assert row.std_error == pytest.approx(
        np.sqrt(17 / 16 * np.sum(sums**2)) / usable.sum(), rel=1e-4
    )


def test_the_least_error_is_found_and_shown(chosen):
    best = chosen.glance()
    table = chosen.tidy()
    for row in best.itertuples():
        part = table[(table.layer == row.layer) & (table.class_name == row.class_name)]
        assert row.estimate == part.estimate.min()
    assert "affine" in chosen.summary()
    assert len(chosen.plot().axes) >= 2
    plt.close("all")


def test_ridge_cv_takes_the_planted_sort_of_ridge():
    # pure noise around a constant update wants all the shrinkage there is; a noiseless linear
    # update none
    noise = activations(n_layers=1, maps=lambda x: 0 * x + 1, noise=1.0, documents=20)
    exact = activations(n_layers=1, maps=lambda x: 0.5 * x[:, ::-1], noise=0.0, documents=20)
    labels = ["affine", "affine[scope=global]", "affine[scope=global+local]", "mean"]
    for data, expected in ((noise, max(RIDGES)), (exact, min(RIDGES))):
        parts = decompose(data, labels, k=24, ridge="cv").compute()
        assert parts.function_class.values[0] == "affine[ridge=cv]"
        ridges = parts["ridge"].values[0, :, 0]
        assert ridges[0] == np.float32(expected)
        assert ridges[1] == np.float32(expected)
        assert np.isnan(ridges[3])
        fixed = decompose(data, [f"affine[ridge={expected}]"], k=24).compute()
        assert np.array_equal(fixed["tokenwise"][:, 0], parts["tokenwise"][:, 0])


def test_the_error_falls_with_the_reference_and_has_a_limit(data):
    curve = reference_curve(data, ["affine", "mean"], sizes=(60, 120, 240, 500), k=16, draws=50)
    table = curve.tidy()
    assert set(table.n_reference) == {60, 120, 240, 500}
    affine = table[(table.function_class == "affine") & (table.layer == 1)]
    assert affine.estimate.is_monotonic_decreasing
    limits = curve.glance()
    assert np.all(limits.conf_low <= limits.estimate + 1e-9)
    assert np.all(limits.estimate <= limits.error_at_largest + 0.01)
    assert "limit" in curve.summary()
    curve.plot()
    plt.close("all")


def test_power_laws_are_recovered_and_never_negative():
    n = np.array([500, 1000, 2000, 4000, 8000, 16000.0])
    values = np.stack([0.3 + 2 * n**-0.5, 0 + 3 * n**-0.2, np.full(6, 0.7), 0.1 + 1e-5 * n])
    limit, slope, exponent = fit_power_law(n, values)
    assert limit[0] == pytest.approx(0.3, abs=1e-6) and exponent[0] == pytest.approx(0.5)
    assert slope[0] == pytest.approx(2, rel=1e-4)
    assert limit[1] == pytest.approx(0, abs=1e-6) and limit[2] == pytest.approx(0.7)
    assert np.all(limit >= 0) and np.all(slope >= 0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda d: cross_validate(d, k=()), "at least one value"),
        (lambda d: cross_validate(d, flavour=1), "unknown options"),
        (lambda d: reference_curve(d, sizes=(100, 200)), "at least 4"),
        (lambda d: reference_curve(d, sizes=(50, 100, 200, 10**6)), "there are only 510"),
        (lambda d: reference_curve(d, level=2), "level=2"),
    ],
)
def test_bad_input_is_named(data, call, message):
    with pytest.raises(ValueError, match=message):
        call(data)
