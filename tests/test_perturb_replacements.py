"""What may take the place of a layer's output, and what of the output is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from geomstats_lm import decompose, extract, perturb
from geomstats_lm.blocks import capture, resume
from geomstats_lm.controls import control_vectors, participation_ratio
from geomstats_lm.damage import damage_ratio
from geomstats_lm.divergence import OUTPUT_MEASURES, STATE_MEASURES
from geomstats_lm.models import as_language_model
from geomstats_lm.replacements import project_off, project_on, replacements_of
from tests.model_samples import random_windows, tiny_gpt2


def parts_of(lm, *, classes=("mean",), length=8, n_windows=12):
    activations = extract(lm, random_windows(n_windows, length), progress=False)
    return decompose(activations, list(classes), k=6).compute()


@pytest.fixture(scope="module")
def gpt2():
    lm = tiny_gpt2()
    return lm, parts_of(lm)


def ids_of(parts):
    length = parts.attrs["window_length"]
    return torch.from_numpy(parts.token_id.values.reshape(-1, length).astype(np.int64))


def kl_by_hand(lm, parts, layer, new_state):
    """KL at every token with all usable ones set to ``new_state``, shape (token, dim)."""
    ids = ids_of(parts)
    states, logits = capture(lm, ids)
    given = states[layer].clone()
    usable = torch.from_numpy((parts.position.values > 0).reshape(ids.shape))
    given[usable] = torch.from_numpy(new_state).float().reshape(given.shape)[usable]
    patched = resume(lm, ids, layer, given)
    p, q = (z.double().log_softmax(-1).reshape(-1, z.shape[-1]) for z in (logits, patched))
    return (p.exp() * (p - q)).sum(-1).numpy()


def test_every_replacement_equals_its_state_by_hand(gpt2) -> None:
    lm, parts = gpt2
    layer = 2
    basis = np.random.default_rng(0).standard_normal((lm.dim, 3))
    q, _ = np.linalg.qr(basis)
    damage = perturb(
        lm, parts, function_class="mean", layers=[layer], positions=["all"], progress=False,
        factors=[0.5],
        replace={
            "drop": "drop", "only": "keep_only", "on": project_on(basis), "off": project_off(basis),
            "own": lambda state, update, residual: state, "same": lambda s, u, r: s + u,
        },
    )  # fmt: skip
    assert damage.replacement.values.tolist() == [
        "drop", "only", "on", "off", "own", "same", "drop[factor=0.5]",
    ]  # fmt: skip
    assert damage.kl.dims == (
        "model", "function_class", "replacement", "positions", "layer", "token",
    )  # fmt: skip
    states, _ = capture(lm, ids_of(parts))
    before, after = (states[v].reshape(-1, lm.dim).double().numpy() for v in (layer - 1, layer))
    r = parts.residual.sel(function_class="mean", layer=layer)[0].values.astype(float)
    expected = {
        "drop": after - r, "only": before + r, "on": after - r + r @ q @ q.T,
        "off": after - r @ q @ q.T, "own": before, "drop[factor=0.5]": after - r / 2,
    }  # fmt: skip
    usable = parts.position.values > 0
    for label, state in expected.items():
        found = damage.kl.sel(replacement=label).values[0, 0, 0, 0]
        np.testing.assert_allclose(
            found[usable], kl_by_hand(lm, parts, layer, state)[usable], rtol=1e-4, atol=1e-12,
            err_msg=label,
        )  # fmt: skip
    assert float(damage.kl.sel(replacement="same").max()) == 0  # exactly what it was
    np.testing.assert_allclose(damage.factor.values, [1, *[np.nan] * 5, 0.5])


def test_dose_response_starts_at_zero_grows_and_shares_its_controls(gpt2) -> None:
    lm, parts = gpt2
    factors = [0, 0.25, 0.5, 1]
    damage = perturb(
        lm, parts, function_class="mean", factors=factors, draws=2, n_single=3, progress=False
    )
    assert damage.factor.values.tolist() == factors
    mean = damage.kl.mean(["token", "layer"]).squeeze()
    assert float(mean.sel(positions="all")[0]) == 0
    assert (np.diff(mean.values, axis=0) > 0).all()
    # quadratic at first: the same draws at half the size, so the controls say so too
    control = damage.kl_control.mean(["token", "layer", "draw"]).squeeze()
    for curve in (mean, control):
        assert (curve[2] / curve[1]).values == pytest.approx(4, rel=0.5)
    plain = perturb(
        lm, parts, function_class="mean", draws=2, n_single=3, progress=False
    )  # the default is the dose 1 without the dim
    assert "replacement" not in plain.dims
    for name in ("kl", "kl_control", "loss_change", "top1_changed", "damage_ratio"):
        np.testing.assert_allclose(
            plain[name], damage[name].isel(replacement=3), rtol=1e-5, atol=1e-9
        )
    ratios = damage_ratio(damage, n_boot=99).tidy()
    assert sorted(ratios["factor"].unique()) == factors
    nothing = ratios[(ratios.factor == 0) & (ratios.positions == "all")]
    assert nothing["estimate"].isna().all()
    merged = ratios[(ratios.factor == 1)].set_index(["positions", "layer"])["estimate"]
    for (mode, layer), value in merged.items():
        one = plain.damage_ratio.sel(positions=mode, layer=layer).values.item()
        assert value == pytest.approx(one, rel=1e-4)


def test_swapped_residuals_are_another_tokens_at_their_own_size(gpt2) -> None:
    lm, parts = gpt2
    (rule,) = replacements_of("swap", None)
    from geomstats_lm.replacements import Context

    residual = np.random.default_rng(0).standard_normal((8, 4))
    context = Context(1, residual, np.arange(8), 0, np.random.default_rng(1))
    gets = residual - rule.takes_off(residual, residual, residual, context)
    for token, row in enumerate(gets):
        source = np.flatnonzero(np.isclose(residual, row).all(axis=1))
        assert len(source) == 1 and source[0] != token
    damage = perturb(lm, parts, function_class="mean", replace="swap", progress=False)
    other = perturb(lm, parts, function_class="mean", replace="swap", seed=1, progress=False)
    again = perturb(lm, parts, function_class="mean", replace="swap", batch_size=1, progress=False)
    np.testing.assert_allclose(damage.kl, again.kl, rtol=1e-3, atol=1e-8)
    assert not np.allclose(damage.kl.sel(positions="all"), other.kl.sel(positions="all"),
                           equal_nan=True)  # fmt: skip


def test_functions_get_what_they_name_and_are_checked(gpt2) -> None:
    lm, parts = gpt2
    seen = []

    def noisy(state, update, residual, layer, rng):
        seen.append((layer, state.shape))
        state[:] = 7  # a function's own copy: the model's state stays what it was
        return update + residual + rng.standard_normal(state.shape)

    perturb(lm, parts, function_class="mean", replace=noisy, layers=[3], progress=False)
    assert set(seen) == {(3, (8, 16))}
    ask = {"function_class": "mean", "progress": False}
    for replace, match in [
        ("spin", "replace='spin': accepted are drop"),
        ("drop[factor=much]", "the factor is no number"),
        (7, "replace|not iterable"),
        ([lambda s, u, r: s, lambda s, u, r: u], "each once"),
        (lambda s, u, r: s[:, :3], "gave an array of shape"),
        (lambda s, u, r: s * np.nan, "not finite"),
        (project_on(np.ones((5, 1))), "needs a basis of 16 dims"),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            perturb(lm, parts, replace=replace, **ask)
    with pytest.raises(ValueError, match="factors="):
        perturb(lm, parts, factors=[np.inf], **ask)


def test_subspaces_by_layer() -> None:
    rng = np.random.default_rng(0)
    basis = xr.DataArray(
        rng.standard_normal((2, 3, 6)), dims=("layer", "component", "dim"), coords={"layer": [4, 5]}
    )
    r = rng.standard_normal((7, 6))
    zero = np.zeros_like(r)
    for layer in (4, 5):
        kept = project_on(basis)(zero, r, r, layer=layer)
        q, _ = np.linalg.qr(basis.sel(layer=layer).values.T)
        np.testing.assert_allclose(kept, r @ q @ q.T, atol=1e-12)
        rest = project_off(basis)(zero, r, r, layer=layer)
        np.testing.assert_allclose(kept + rest, r, atol=1e-12)
    with pytest.raises(ValueError, match="layer 6 needs a basis"):
        project_on(basis)(zero, r, r, layer=6)
    whole = basis.expand_dims(model=["tiny"], function_class=["affine"])  # as they are stored
    np.testing.assert_allclose(
        project_on(whole)(zero, r, r, layer=4), project_on(basis)(zero, r, r, layer=4)
    )
    with pytest.raises(ValueError, match="select one function class"):
        project_on(basis.expand_dims(function_class=["affine", "mean"]))
    with pytest.raises(ValueError, match="basis has dims"):
        project_on(basis.rename(dim="width"))


def test_all_measures_come_from_the_same_output(gpt2) -> None:
    lm, parts = gpt2
    names = (*OUTPUT_MEASURES, *STATE_MEASURES)
    damage = perturb(
        lm, parts, function_class="mean", measures=names, n_single=3, control_measures=["js", "kl"],
        progress=False,
    )  # fmt: skip
    plain = perturb(lm, parts, function_class="mean", n_single=3, progress=False)
    assert set(names) <= set(damage) and "js_control" in damage and "top1_changed_control" not in (
        damage
    )  # fmt: skip
    for name in ("kl", "kl_control", "top1_changed"):
        np.testing.assert_allclose(plain[name], damage[name], rtol=1e-12)
    patched = damage.patched.broadcast_like(damage.kl)
    for name in set(names) - {"loss_change"}:
        assert (np.isfinite(damage[name]) == patched).all(), name
    changed = damage.top1_changed.values == 1
    assert (damage.rank_top1.values[changed] > 1).all() and changed.any()
    # the last layer by hand: final norm of the patched state
    last = lm.n_layers
    states, _ = capture(lm, ids_of(parts))
    residual = torch.from_numpy(parts.residual.sel(function_class="mean", layer=last)[0].values)
    norm = lm.model.transformer.ln_f
    moved = (
        norm(states[last]) - norm(states[last] - residual.reshape(states[last].shape))
    ).double()
    found = damage.state_distance.sel(layer=last, positions="all").values[0, 0]
    usable = np.isfinite(found)
    np.testing.assert_allclose(found[usable], moved.norm(dim=-1).reshape(-1)[usable], rtol=1e-4)


def test_models_without_a_head_have_their_final_state() -> None:
    lm = tiny_gpt2(head=False)
    parts = parts_of(lm, classes=("mean",))
    damage = perturb(lm, parts, function_class="mean", n_single=3, downstream=True, progress=False)
    assert {"state_distance", "state_cosine", "state_distance_control"} <= set(damage)
    assert "kl" not in damage and damage.replay_difference.item() == 0
    ids, layer = ids_of(parts), 2
    states, _ = capture(lm, ids)
    residual = parts.residual.sel(function_class="mean", layer=layer)[0].values
    single = damage.state_distance.sel(positions="single", layer=layer).values[0, 0]
    for token in np.flatnonzero(np.isfinite(single))[:3]:
        off = np.zeros_like(residual)
        off[token] = residual[token]
        given = states[layer] - torch.from_numpy(off).reshape(states[layer].shape)
        hooked = _hooked_final(lm, ids, layer, given)
        moved = (hooked - _hooked_final(lm, ids, layer, states[layer])).double().norm(dim=-1)
        assert single[token] == pytest.approx(float(moved.reshape(-1)[token]), rel=1e-4)
        row, position = divmod(int(token), 8)
        if position < 7:
            later = float(moved[row, position + 1 :].mean())
            found = damage.downstream.sel(layer=layer).values[0, 0, token]
            assert found == pytest.approx(later, rel=1e-4)
    assert damage_ratio(damage, n_boot=49).settings["measure"] == "state_distance"
    with pytest.raises(ValueError, match="has no language-model head; accepted are state_distance"):
        perturb(lm, parts, function_class="mean", measures=["kl"])


def _hooked_final(lm, ids, layer, given):
    handle = lm.blocks[layer - 1].register_forward_hook(lambda m, a, output: (
        (given, *output[1:]) if isinstance(output, tuple) else given
    ))  # fmt: skip
    try:
        with torch.no_grad():
            return lm.model(input_ids=ids).last_hidden_state
    finally:
        handle.remove()


def test_downstream_equals_brute_force(gpt2) -> None:
    lm, parts = gpt2
    damage = perturb(
        lm, parts, function_class="mean", n_single=3, downstream=True, layers=[2], progress=False
    )
    ids = ids_of(parts)
    states, logits = capture(lm, ids)
    residual = torch.from_numpy(parts.residual.sel(function_class="mean", layer=2)[0].values)
    found = damage.downstream.values[0, 0, 0]
    patched = damage.patched.sel(positions="single").values[0, 0]
    last = parts.position.values == 7
    assert (np.isfinite(found) == (patched & ~last)).all()
    for token in np.flatnonzero(np.isfinite(found))[:5]:
        given = states[2].clone().reshape(-1, lm.dim)
        given[token] -= residual[token]
        after = resume(lm, ids, 2, given.reshape(states[2].shape))
        p, q = (z.double().log_softmax(-1) for z in (logits, after))
        kl = (p.exp() * (p - q)).sum(-1)
        row, position = divmod(int(token), 8)
        assert found[token] == pytest.approx(float(kl[row, position + 1 :].mean()), rel=1e-3)
        assert float(kl[row, :position].max()) < 1e-10 if position else True
    with pytest.raises(ValueError, match="downstream"):
        perturb(lm, parts, function_class="mean", positions=["all"], downstream=True)


def test_every_position_and_unusable_tokens_on_request(gpt2) -> None:
    lm, parts = gpt2
    massive = parts.copy(deep=True)
    massive["is_massive"][0, 1, 10] = True
    usable = perturb(lm, massive, function_class="mean", n_single=None, progress=False)
    every = perturb(
        lm, massive, function_class="mean", n_single=None, exclude=False, progress=False
    )
    assert every.patched.all() and np.isfinite(every.kl).all()
    first = massive.position.values == 0
    assert not usable.patched.values[..., first].any()
    assert not usable.patched.sel(layer=2)[..., 10].any()
    there = usable.patched.sel(positions="single")
    np.testing.assert_allclose(  # single positions do not touch one another
        usable.kl.sel(positions="single").values[0][:, there[0]],
        every.kl.sel(positions="single").values[0][:, there[0]], rtol=1e-3, atol=1e-9,
    )  # fmt: skip
    sampled = perturb(lm, massive, function_class="mean", n_single=3, progress=False)
    both = sampled.patched.sel(positions="single")[0]
    np.testing.assert_allclose(
        sampled.kl.sel(positions="single").values[0][:, both],
        usable.kl.sel(positions="single").values[0][:, both], rtol=1e-3, atol=1e-9,
    )  # fmt: skip


def test_floors_and_replay_are_reported(gpt2) -> None:
    lm, parts = gpt2
    damage = perturb(lm, parts, function_class="mean", progress=False)
    assert damage.replay_difference.item() == 0
    assert damage.kl_floor.dims == ("model", "positions")
    assert (damage.kl_floor < 1e-10).all()
    ratio = damage.participation_ratio.values[0, 0]
    usable = parts.position.values > 0
    for index, value in enumerate(ratio):
        own = parts.residual[0, 0, index].values[usable]
        eigen = np.linalg.eigvalsh(np.cov(own, rowvar=False))
        assert value == pytest.approx(eigen.sum() ** 2 / (eigen**2).sum(), rel=1e-6)
    assert np.isnan(participation_ratio(np.ones((1, 3))))


def test_sixteen_bit_models_report_a_larger_floor() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    lm = as_language_model(LlamaForCausalLM(config).bfloat16(), name="halved")
    parts = parts_of(lm)
    damage = perturb(
        lm, parts, function_class="mean", factors=[0, 1], n_single=3, downstream=True,
        progress=False,
    )  # fmt: skip
    assert damage.replay_difference.item() == 0
    nothing = damage.kl.sel(replacement="drop[factor=0]")
    assert float(nothing.sel(positions="all").max()) == 0
    assert np.isfinite(damage.kl.sel(positions="all").values[..., parts.position > 0]).all()
    # single positions run in another batch shape: bounded by a multiple of the measured floor
    floor = damage.kl_floor.sel(positions="single").item()
    assert float(nothing.sel(positions="single").max()) <= max(10 * floor, 1e-6)


def test_large_vocabularies_go_through_the_head_in_blocks(gpt2, monkeypatch) -> None:
    import sys

    module = sys.modules["geomstats_lm.output_damage"]
    lm, parts = gpt2
    whole = perturb(lm, parts, function_class="mean", n_single=3, progress=False)
    seen, real = [], module.apply_head
    monkeypatch.setattr(module, "HEAD_ELEMENTS", 5 * lm.vocabulary)
    monkeypatch.setattr(module, "FINAL_BYTES", 10_000)
    monkeypatch.setattr(
        module, "apply_head", lambda m, final: (seen.append(len(final)), real(m, final))[1]
    )
    blocked = perturb(lm, parts, function_class="mean", n_single=3, progress=False)
    assert max(seen) <= 5  # rows of logits in memory at once
    for name in ("kl", "kl_control", "loss_change"):
        np.testing.assert_allclose(blocked[name], whole[name], rtol=1e-4, atol=1e-7)
    assert float(blocked.kl.sel(positions="all").max()) > 0


def test_controls_never_lend_a_tokens_own_residual() -> None:
    pool, rng = np.array([3, 9]), np.random.default_rng(0)
    donors = np.array([[1.0, 0], [0, 1]])
    drawn = control_vectors("exchanged", 12, donors, pool, 0, rng)
    assert drawn[3].tolist() == [0, 1] and drawn[9].tolist() == [1, 0]
    alone = control_vectors("exchanged", 3, donors[:1], pool[:1], 0, rng)
    assert not alone.any()
