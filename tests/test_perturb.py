"""Damage against brute force, controls of the same size, nothing patched where nothing may be."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import xarray as xr

from geomstats_lm import decompose, extract, perturb
from geomstats_lm.blocks import capture
from geomstats_lm.controls import control_residuals
from geomstats_lm.models import parameter_checksum
from tests.families import random_model
from tests.model_samples import random_windows, tiny_bert, tiny_gpt2

CONTROLS = ("exchanged", "gaussian", "isotropic")


def parts_of(lm, *, classes=("identity", "affine"), length=8, n_windows=12):
    cut = random_windows(n_windows, length, vocabulary=min(lm.vocabulary, 60))
    activations = extract(lm, cut, progress=False)
    return decompose(activations, list(classes), k=6).compute()


@pytest.fixture(scope="module")
def gpt2():
    lm = tiny_gpt2()
    return lm, parts_of(lm)


def brute(lm, parts, label, layer, tokens):
    """KL at every token with just ``tokens`` patched, by one plain forward pass of all windows."""
    length = parts.attrs["window_length"]
    ids = torch.from_numpy(parts.token_id.values.reshape(-1, length).astype(np.int64))
    residual = parts.residual.sel(function_class=label, layer=layer)[0].values
    states, logits = capture(lm, ids)
    off = np.zeros_like(residual)
    off[tokens] = residual[tokens]
    given = states[layer] - torch.from_numpy(off).reshape(states[layer].shape)

    def hook(module, args, output):
        return (given, *output[1:]) if isinstance(output, tuple) else given

    handle = lm.blocks[layer - 1].register_forward_hook(hook)
    with torch.no_grad():
        patched = lm.model(input_ids=ids).logits
    handle.remove()
    p, q = (z.double().log_softmax(-1).reshape(-1, z.shape[-1]) for z in (logits, patched))
    return (p.exp() * (p - q)).sum(-1).numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama", "mamba2", "rwkv", "bloom", "jamba"])
def test_damage_equals_brute_force(family: str) -> None:
    lm = random_model(family)
    parts = parts_of(lm, classes=("identity", "mean"), n_windows=6)
    damage = perturb(lm, parts, function_class="mean", n_single=3, progress=False)
    usable = parts.position.values > 0
    for layer in (1, lm.n_layers):
        kl = damage.kl.sel(function_class="mean", layer=layer)[0]
        massive = parts.is_massive.sel(layer=layer)[0].values
        expected = brute(lm, parts, "mean", layer, usable & ~massive)
        found = kl.sel(positions="all").values
        assert (np.isfinite(found) == (usable & ~massive)).all()
        np.testing.assert_allclose(found[usable & ~massive], expected[usable & ~massive], rtol=1e-4)
        single = kl.sel(positions="single").values
        for token in np.flatnonzero(np.isfinite(single))[:4]:
            # float32 logits: KL carries their rounding, about 1e-7 of the logits' size squared
            one = brute(lm, parts, "mean", layer, [token])[token]
            assert single[token] == pytest.approx(one, rel=1e-3, abs=1e-9)


def test_tokenwise_model_is_reproduced_by_its_token_means() -> None:
    """Attention removed and no positions added: blocks act on each token alone."""
    lm = random_model("llama")
    weights = [block.self_attn.o_proj.weight for block in lm.blocks]
    before = [w.detach().clone() for w in weights]
    try:
        for weight in weights:
            weight.data.zero_()
        cut = random_windows(60, 8, vocabulary=12)
        parts = decompose(
            extract(lm, cut, progress=False), ["token_mean", "mean", "affine"], k=4
        ).compute()
        damage = perturb(lm, parts, function_class=["token_mean", "mean"], progress=False)
    finally:
        for weight, value in zip(weights, before):
            weight.data.copy_(value)
    exact = parts.residual.sel(function_class="token_mean")
    size = np.abs(parts["update"]).max()
    assert float(np.abs(exact).max() / size) < 1e-5
    assert float(damage.kl.sel(function_class="token_mean").max()) < 1e-9
    # the others show their approximation error
    assert float(np.abs(parts.residual.sel(function_class="mean")).max() / size) > 0.1
    assert float(damage.kl.sel(function_class="mean").mean()) > 1e-3


def test_nothing_patched_nothing_changed_and_what_is_left_out_is_nan(gpt2) -> None:
    lm, parts = gpt2
    quiet = parts.copy(deep=True)
    quiet["residual"][:] = 0
    damage = perturb(lm, quiet, function_class="affine", progress=False)
    # "all" replays the same batch: exactly nothing; "single" differs by the batch's shape only
    assert float(damage.kl.sel(positions="all").max()) == 0
    assert float(damage.kl.sel(positions="single").max()) < 1e-10
    assert float(damage.top1_changed.max()) == 0
    first = damage.position.values == 0
    assert not damage.patched.values[..., first].any()
    assert np.isnan(damage.kl.values[..., first]).all()
    per_window = damage.patched.sel(positions="single")[0, 0].values.reshape(-1, 8).sum(axis=1)
    assert (per_window == 7).all()  # eight asked for, seven usable


def test_massive_tokens_stay_unpatched(gpt2) -> None:
    lm, parts = gpt2
    massive = parts.copy(deep=True)
    massive["is_massive"][0, 1, 10] = True
    damage = perturb(lm, massive, function_class="affine", progress=False)
    assert not damage.patched.sel(layer=2)[..., 10].any()
    assert damage.patched.sel(layer=1, positions="all")[..., 10].all()


def test_damage_grows_from_zero_with_the_residual(gpt2) -> None:
    lm, parts = gpt2
    means = []
    for factor in (0.0, 0.25, 0.5, 1.0):
        scaled = parts.assign(residual=parts.residual * factor)
        damage = perturb(lm, scaled, function_class="affine", positions=["all"], progress=False)
        means.append(float(damage.kl.mean()))
    assert means[0] == 0 and (np.diff(means) > 0).all()
    # KL is quadratic for small changes
    assert means[2] / means[1] == pytest.approx(4, rel=0.5)


def test_last_layer_equals_the_head_on_the_patched_state(gpt2) -> None:
    lm, parts = gpt2
    last = lm.n_layers
    damage = perturb(lm, parts, function_class="affine", layers=[last], progress=False)
    length = parts.attrs["window_length"]
    ids = torch.from_numpy(parts.token_id.values.reshape(-1, length).astype(np.int64))
    states, logits = capture(lm, ids)
    residual = torch.from_numpy(parts.residual.sel(function_class="affine", layer=last)[0].values)
    inner = lm.model.transformer
    by_hand = lm.model.lm_head(inner.ln_f(states[last] - residual.reshape(states[last].shape)))
    p, q = (z.double().log_softmax(-1) for z in (logits, by_hand))
    expected = (p.exp() * (p - q)).sum(-1).reshape(-1).numpy()
    for mode in ("all", "single"):
        found = damage.kl.sel(positions=mode, layer=last)[0, 0].values
        there = np.isfinite(found)
        np.testing.assert_allclose(found[there], expected[there], rtol=1e-3, atol=1e-11)


def test_controls_have_the_tokens_own_norm_and_another_tokens_direction() -> None:
    rng = np.random.default_rng(0)
    residual = rng.standard_normal((40, 6)) * rng.uniform(0.1, 9, (40, 1))
    pool = np.arange(40)
    for control in CONTROLS:
        drawn = control_residuals(control, residual, residual, pool, 0, np.random.default_rng(1))
        np.testing.assert_allclose(
            np.linalg.norm(drawn, axis=1), np.linalg.norm(residual, axis=1), rtol=1e-9
        )
        cosine = (drawn * residual).sum(1) / (residual**2).sum(1)
        assert (cosine < 1 - 1e-9).all()  # never its own
    # exchanged: exactly the direction of another token
    unit = residual / np.linalg.norm(residual, axis=1, keepdims=True)
    exchanged = control_residuals("exchanged", residual, residual, pool, 0, rng)
    match = (exchanged / np.linalg.norm(exchanged, axis=1, keepdims=True)) @ unit.T
    assert (match.max(axis=1) > 1 - 1e-12).all()
    # gaussian: the donors' covariance, up to the norms being the tokens' own
    wide = rng.standard_normal((3000, 2)) * [10, 1]
    many = control_residuals("gaussian", np.ones((3000, 2)), wide, np.arange(3000), 0, rng)
    assert np.abs(many[:, 0]).mean() > 3 * np.abs(many[:, 1]).mean()


def test_batches_seeds_and_stores_agree(gpt2, tmp_path) -> None:
    lm, parts = gpt2
    ask = {
        "function_class": ["identity", "affine"], "controls": CONTROLS, "draws": 2,
        "n_single": 3, "progress": False,
    }  # fmt: skip
    whole = perturb(lm, parts, **ask)
    halved = perturb(lm, parts, batch_size=1, **ask)
    stored = perturb(lm, parts, batch_size=2, store=tmp_path / "s.zarr", **ask).compute()
    for other in (halved, stored):
        assert other.patched.equals(whole.patched)
        for name in ("kl", "kl_control", "loss_change", "damage_ratio"):
            np.testing.assert_allclose(other[name], whole[name], rtol=1e-3, atol=1e-8)
    ratio = whole.kl.mean("token") / whole.kl_control.mean(["draw", "token"])
    xr.testing.assert_allclose(ratio.transpose(*whole.damage_ratio.dims), whole.damage_ratio)
    assert not perturb(lm, parts, seed=1, **ask).kl_control.equals(whole.kl_control)


def test_interrupted_run_carries_on_to_the_same_store(gpt2, tmp_path, monkeypatch) -> None:

    module = sys.modules["geomstats_lm.perturbation_leaf"]
    lm, parts = gpt2
    ask = {"function_class": "affine", "batch_size": 1, "n_single": 2, "progress": False}
    expected = perturb(lm, parts, store=tmp_path / "whole.zarr", **ask).compute()
    calls, real = [], module._measure

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "_measure", failing)
    before = parameter_checksum(lm)
    with pytest.raises(KeyboardInterrupt):
        perturb(lm, parts, store=tmp_path / "cut.zarr", **ask)
    assert parameter_checksum(lm) == before
    resumed = perturb(lm, parts, store=tmp_path / "cut.zarr", **ask).compute()
    xr.testing.assert_identical(resumed, expected)
    n_windows = parts.sizes["token"] // 8
    assert len(calls) == n_windows + 1  # finished units were not done again


def test_bad_arguments_are_named(gpt2) -> None:
    lm, parts = gpt2
    cases = [
        ({"function_class": "spline"}, r"function_class=\['spline'\]: the decomposition holds"),
        ({"layers": [9]}, r"layers=\[9\]: accepted is a sequence of \[1, 2, 3, 4\], each once"),
        ({"layers": [2, 2]}, r"layers=\[2, 2\]: accepted is a sequence of"),
        ({"layers": 2}, r"layers=2: accepted is a sequence of"),
        ({"positions": ["some"]}, "positions="),
        ({"positions": "all"}, "positions='all'"),
        ({"controls": ["noise"]}, "controls="),
        ({"n_single": 0}, "n_single=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"measures": ["kld"]}, r"measures=\['kld'\]: accepted"),
        ({"measures": ["kl"], "control_measures": ["js"]}, r"control_measures=\['js'\]"),
    ]
    for arguments, match in cases:
        with pytest.raises(ValueError, match=match):
            perturb(lm, parts, **arguments)
    with pytest.raises(ValueError, match="is not causal"):
        perturb(tiny_bert(), parts)
    with pytest.raises(ValueError, match="parameters of other are not those"):
        perturb(tiny_gpt2(seed=1, name="other"), parts)
