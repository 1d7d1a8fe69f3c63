"""Directions planted by token, position or size come back as shares; random ones give none."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm.direction import direction_shares, norm_groups, residual_direction
from tests.planted import planted


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def labelled(data: xr.Dataset, seed: int = 0) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    n = data.sizes["token"]
    return data.assign_coords(
        token_id=("token", rng.integers(0, 20, n)), position=("token", 1 + np.arange(n) % 8)
    )


def test_random_directions_go_with_nothing() -> None:
    data = labelled(planted(layers=60, documents=40, per_document=4, dim=24))
    found = residual_direction(data).isel(model=0, function_class=0)
    assert (found.n == 160).all()
    mean = found.share_adjusted.mean("layer")
    error = found.share_adjusted.std("layer") / np.sqrt(60)
    assert (abs(mean) < 4 * error).all()  # four standard errors of a mean over layers
    close = abs(found.share.mean("layer") - found.share_forced.mean("layer"))
    assert (close < 4 * found.share.std("layer") / np.sqrt(60)).all()
    assert found.n_groups.sel(source="state_norm").values.tolist() == [10] * 60


@pytest.mark.parametrize("source", ["common", "token_id", "position", "state_norm"])
def test_what_was_planted_is_found_and_not_the_rest(source) -> None:
    data = labelled(planted(layers=1, documents=200, per_document=5, dim=24))
    rng = np.random.default_rng(5)
    norms = np.linalg.norm(data.state.values[0, 0], axis=-1)
    code = {
        "common": np.zeros(1000, int),
        "token_id": data.token_id.values,
        "position": data.position.values,
        "state_norm": norm_groups(norms),
    }[source]
    centres = unit(rng.standard_normal((code.max() + 1, 24)))
    if source != "common":
        centres -= centres.mean(axis=0)
    residual = centres[code] + 0.1 * rng.standard_normal((1000, 24))
    moved = data.assign(update=data.tokenwise.isel(function_class=0, drop=True) + residual)
    moved["update"] = moved["update"].transpose(*data["update"].dims)
    found = residual_direction(moved).share_adjusted.isel(model=0, function_class=0, layer=0)
    assert found.sel(source=source) > 0.6
    others = [s for s in ("token_id", "position", "state_norm") if s != source]
    assert (abs(found.sel(source=others)) < 0.05).all()


def test_shares_are_the_formula_and_lazy_is_the_same() -> None:
    rng = np.random.default_rng(0)
    directions = unit(rng.standard_normal((50, 6)))
    codes = rng.integers(0, 4, 50)
    table = direction_shares(directions, {"group": codes})
    mean = directions.mean(axis=0)
    within = sum(
        ((directions[codes == g] - directions[codes == g].mean(axis=0)) ** 2).sum()
        for g in range(4)
    )
    total = ((directions - mean) ** 2).sum()
    assert table[0, 0] == pytest.approx(mean @ mean)
    assert table[1, 0] == pytest.approx(1 - within / total)
    assert table[1, 1] == pytest.approx(3 / 49)
    assert table[1, 2] == pytest.approx(1 - within / 46 / (total / 49))
    data = labelled(planted(layers=2))
    lazy = residual_direction(data.chunk({"token": 70, "layer": 1})).compute()
    xr.testing.assert_allclose(lazy, residual_direction(data))


def test_missing_labels_are_named() -> None:
    with pytest.raises(ValueError, match=r"\['token_id', 'position'\] are missing"):
        residual_direction(planted(layers=1))
