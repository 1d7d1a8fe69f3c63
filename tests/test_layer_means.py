"""Means over tokens with intervals of documents, and groups of layers."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm import geometry, geometry_summary, layer_means
from geomstats_lm.layer_means import cluster_means, group_means


def planted(rng: np.random.Generator, layers: int = 3, documents: int = 30) -> xr.Dataset:
    dims = ("model", "layer", "token")
    document = np.repeat(np.arange(documents), 5)
    shared = rng.normal(size=documents)[document]  # what the layers of a document share
    update = rng.normal(size=(1, layers, len(document), 8)) + shared[:, None]
    return xr.Dataset(
        {
            "update": ((*dims, "dim"), update),
            "state": ((*dims, "dim"), update),
            "tokenwise": (("model", "function_class", *dims[1:], "dim"), 0.5 * update[:, None]),
        },
        {"model": ["m"], "function_class": ["half"], "layer": 1 + np.arange(layers),
         "document": ("token", document)},
    )  # fmt: skip


def test_means_and_ratios_are_their_formulas() -> None:
    measured = geometry(planted(np.random.default_rng(1)))
    table = layer_means(measured, ["relative_error", "residual_norm", "explained"], n_boot=199)
    frame = table.tidy().set_index(["measure", "layer"])
    assert frame.loc[("relative_error", 2), "estimate"] == pytest.approx(0.5)
    sizes = measured.residual_norm.values[0, 0, 1].astype(float)
    assert frame.loc[("residual_norm", 2), "estimate"] == pytest.approx(sizes.mean())
    updates = measured.update_norm.values[0, 1].astype(float)
    by_hand = 1 - (sizes**2).sum() / (updates**2).sum()
    assert frame.loc[("explained", 2), "estimate"] == pytest.approx(by_hand)
    assert (frame["conf_low"] <= frame["estimate"]).all()


def test_a_group_keeps_the_dependence_between_its_layers() -> None:
    rng = np.random.default_rng(2)
    codes = np.repeat(np.arange(25), 4)
    shared = rng.normal(size=25)[codes]
    counts = np.ones((25, 1))
    alike = np.stack([shared, shared]) + 0.01 * rng.normal(size=(2, 100))
    apart = rng.normal(size=(2, 25))[:, codes]
    single = cluster_means(alike, codes, counts)
    mean, error = group_means(alike, codes, counts, [[0], [1], [0, 1]])
    np.testing.assert_allclose(mean[:2], single[0])
    np.testing.assert_allclose(error[:2], single[1])
    assert error[2, 0] == pytest.approx(error[0, 0], rel=0.02)  # two copies teach nothing new
    error = group_means(apart, codes, counts, [[0], [1], [0, 1]])[1][:, 0]
    assert error[2] < 0.9 * error[:2].mean()


def test_summary_of_a_group_is_the_mean_of_its_layers() -> None:
    measured = geometry(planted(np.random.default_rng(3)))
    single = geometry_summary(measured, n_boot=99).tidy()
    pooled = geometry_summary(measured, n_boot=99, groups={"late": [2, 3]}).tidy()
    assert "layer" not in pooled and set(pooled["layer_group"]) == {"late"}
    row = pooled[pooled["measure"] == "cos_update_residual"].iloc[0]
    layers = single[(single["measure"] == "cos_update_residual") & (single["layer"] > 1)]
    for column in ("observed", "forced", "null_mean", "estimate"):
        assert row[column] == pytest.approx(layers[column].mean(), abs=1e-9)
    assert row["null_high"] - row["null_low"] < (layers["null_high"] - layers["null_low"]).max()
    assert row["n"] == layers["n"].sum()


def test_errors_name_the_argument() -> None:
    measured = geometry(planted(np.random.default_rng(4)))
    with pytest.raises(ValueError, match=r"measures: \['nonsense'\]"):
        layer_means(measured, ["nonsense"])
    with pytest.raises(ValueError, match=r"groups\['x'\]=\[9\]"):
        layer_means(measured, ["relative_error"], groups={"x": [9]})
    with pytest.raises(ValueError, match="cluster='work' is no token coordinate"):
        layer_means(measured, cluster="work")
    with pytest.raises(ValueError, match="interval='bca'"):
        layer_means(measured, interval="bca")
