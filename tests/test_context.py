"""Context and misfit add up to the residual; a block without attention has no context."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm import decompose, extract
from geomstats_lm.context import context, context_summary
from geomstats_lm.parts import extract_parts
from geomstats_lm.parts_geometry import parts_geometry
from tests.model_samples import random_windows, tiny_gpt2
from tests.planted import planted


def test_planted_context_and_misfit_come_back() -> None:
    data = planted(layers=2, dim=12, documents=20, per_document=5)
    rng = np.random.default_rng(0)
    residual = data["update"] - data.tokenwise
    # context is a quarter of the residual and something across it
    across = residual.copy(data=rng.standard_normal(residual.shape))
    unit = residual / np.sqrt((residual**2).sum("dim"))
    across = across - (across * unit).sum("dim") * unit
    added = 0.25 * residual + across
    oracle = (data["update"] - added).assign_coords(function_class=["self_only"])
    both = data.drop_vars(["tokenwise", "function_class"])
    both = both.assign(tokenwise=xr.concat([data.tokenwise, oracle], "function_class").transpose(
        "model", "function_class", "layer", "token", "dim"))  # fmt: skip
    found = context(both, m=3)
    one = found.sel(function_class="planted")
    np.testing.assert_allclose(one.share_context, 0.25, atol=1e-5)
    oracle_row = found.sel(function_class="self_only")
    np.testing.assert_allclose(oracle_row.share_context, 1, atol=1e-6)
    np.testing.assert_allclose(oracle_row.overlap_residual_context, 1, atol=1e-9)
    assert (found.chance_overlap == 3 / 12).all()
    energy = (added**2).sum(["dim", "token"]) / (data["update"] ** 2).sum(["dim", "token"])
    np.testing.assert_allclose(
        found.context_of_update, energy.isel(function_class=0, drop=True), rtol=1e-5
    )
    table = context_summary(found, n_boot=99).tidy().query("function_class == 'planted'")
    parts = table.set_index(["layer", "part"]).estimate
    for layer in (1, 2):
        assert parts[layer, "context"] == pytest.approx(0.25, abs=1e-5)
        assert parts[layer, "misfit"] == pytest.approx(0.75, abs=1e-5)


def test_intervals_of_shares_cover_at_the_level() -> None:
    """100 layers drawn alike: 95 % intervals miss the true share at most 14 times (p = .001)."""
    rng = np.random.default_rng(1)
    layers, n = 100, 150
    shares = rng.normal(0.4, 0.3, (1, 1, layers, n))
    dims = ("model", "function_class", "layer", "token")
    measured = xr.Dataset(
        {
            "share_context": (dims, shares),
            "residual_norm": (dims, rng.uniform(1, 2, shares.shape)),
            "usable": (("model", "layer", "token"), np.ones((1, layers, n), bool)),
        },
        {"model": ["m"], "function_class": ["a"], "layer": np.arange(layers),
         "document": ("token", np.arange(n) // 5)},
    )  # fmt: skip
    table = context_summary(measured, n_boot=199).tidy().query("part == 'context'")
    missed = (table.conf_low > 0.4) | (table.conf_high < 0.4)
    assert missed.sum() <= 14


def zeroed(part: str):
    model = tiny_gpt2(seed=2)
    for block in model.blocks:
        projection = getattr(block, part).c_proj
        projection.weight.data.zero_()
        projection.bias.data.zero_()
    return model, extract(model, random_windows(), progress=False)


def test_a_model_of_mlps_alone_has_no_residual_under_self_only() -> None:
    model, activations = zeroed("attn")
    fitted = decompose(activations, ["mean", "self_only"], k=4, model=model).compute()
    alone = fitted.sel(function_class="self_only")
    size = float(np.abs(fitted["update"]).max())
    assert float(np.abs(alone.residual).max()) < 1e-5 * size
    found = context(fitted)
    assert float(found.context_of_update.max()) < 1e-9
    table = context_summary(found, n_boot=99).tidy().query("function_class == 'mean'")
    assert table[table.part == "misfit"].estimate.to_numpy() == pytest.approx(1, abs=1e-4)


def test_without_mlp_the_context_part_lies_in_the_mixer() -> None:
    model, activations = zeroed("mlp")
    fitted = decompose(activations, ["mean", "self_only"], k=4, model=model).compute()
    parts = extract_parts(model, activations)
    added = fitted.residual.sel(function_class="self_only").values
    mixer, mlp = parts.mixer.values, parts.mlp.values
    # the mixer's contribution is the token's own value and what context adds, the MLP's nothing
    own = fitted.tokenwise.sel(function_class="self_only").values
    np.testing.assert_allclose(mixer - own, added, atol=1e-5)
    assert np.abs(mlp).max() == 0 and np.abs(added).max() > 1e-3
    measured = parts_geometry(fitted, parts)
    assert np.isfinite(measured.cos_residual_mixer).any()


def test_model_takes_the_place_of_the_class() -> None:
    model, activations = zeroed("mlp")
    both = decompose(activations, ["mean", "self_only"], k=4, model=model).compute()
    without = both.sel(function_class=["mean"])
    a, b = context(both), context(without, model=model)
    np.testing.assert_allclose(
        a.share_context.sel(function_class="mean"), b.share_context[:, 0], atol=1e-4
    )
    lazy = context(without.chunk({"token": 16, "layer": 1}), model=model).compute()
    np.testing.assert_allclose(lazy.share_context, b.share_context, atol=1e-5)
    with pytest.raises(ValueError, match="'self_only' is not among"):
        context(without)
