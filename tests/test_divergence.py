"""Every measure of the output against a plain float64 formula, its floor, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geomstats_lm import divergence
from geomstats_lm.divergence import (
    OUTPUT_MEASURES,
    clean_output,
    compare_outputs,
    compare_states,
    take_rows,
)


@pytest.fixture(scope="module")
def logits():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(50, 300, generator=rng) * 3
    w = z + 0.3 * torch.randn(50, 300, generator=rng)
    target = torch.randint(0, 300, (50,), generator=rng)
    target[-1] = -1
    return z, w, target


def test_every_measure_equals_its_formula(logits) -> None:
    z, w, target = logits
    found = compare_outputs(clean_output(z, target), w, tuple(OUTPUT_MEASURES))
    log_p, log_q = z.double().log_softmax(-1), w.double().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    a, b = (v.double() - v.double().mean(-1, keepdim=True) for v in (z, w))
    top = z.argmax(-1, keepdim=True)
    expected = {
        "kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "js": ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2,
        "logit_l2": (a - b).norm(dim=-1),
        "logit_cosine": torch.cosine_similarity(a, b, dim=-1),
        "top1_changed": (z.argmax(-1) != w.argmax(-1)).double(),
        "rank_top1": (w > w.gather(1, top)).sum(-1).double() + 1,
    }
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12, msg=name)
    loss = (log_p - log_q).gather(1, target.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(found["loss_change"][:-1], loss[:-1], rtol=1e-9, atol=1e-12)
    assert torch.isnan(found["loss_change"][-1])
    assert set(found) == {*expected, "loss_change"}
    assert (found["rank_top1"] > 1).any() and (found["rank_top1"] >= 1).all()
    # Jensen-Shannon is at most log 2, and below the mean of the two divergences over four
    assert (found["js"] <= np.log(2)).all()
    assert (found["js"] <= (found["kl"] + found["reverse_kl"]) / 4 + 1e-15).all()


def test_same_output_is_exactly_no_damage_and_small_damage_is_above_the_floor(logits) -> None:
    z, _, target = logits
    clean = clean_output(z, target)
    same = compare_outputs(clean, z.clone(), tuple(OUTPUT_MEASURES))
    for name in ("kl", "reverse_kl", "top1_changed", "logit_l2"):
        assert float(same[name].abs().max()) == 0, name
    assert float(same["js"].max()) < 1e-15 and float(same["rank_top1"].max()) == 1
    rng = torch.Generator().manual_seed(1)
    tiny = compare_outputs(clean, z + 1e-6 * torch.randn(z.shape, generator=rng))
    assert 0 < float(tiny["kl"].mean()) < 1e-10  # float32 log-probabilities stop near 1e-8


def test_adding_a_constant_to_all_logits_is_no_damage(logits) -> None:
    z, w, target = logits
    moved = (w.double() + 700).float()  # float32 logits of size 700 are rounded to 3e-5
    found, shifted = (
        compare_outputs(clean_output(z, target), v, tuple(OUTPUT_MEASURES)) for v in (w, moved)
    )
    for name in OUTPUT_MEASURES:
        torch.testing.assert_close(
            shifted[name], found[name], rtol=1e-3, atol=1e-4, equal_nan=True, msg=name
        )


def test_block_size_and_chosen_rows_change_nothing(logits, monkeypatch) -> None:
    z, w, target = logits
    whole = compare_outputs(clean_output(z, target), w, tuple(OUTPUT_MEASURES))
    monkeypatch.setattr(divergence, "BLOCK_ELEMENTS", 7 * z.shape[1])
    parts = compare_outputs(clean_output(z, target), w, tuple(OUTPUT_MEASURES))
    rows = torch.tensor([3, 17, 48])
    some = compare_outputs(take_rows(clean_output(z, target), rows), w[rows])
    for name in OUTPUT_MEASURES:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=0, equal_nan=True)
    torch.testing.assert_close(some["kl"], whole["kl"][rows], rtol=1e-12, atol=0)


def test_sixteen_bit_logits_and_states_are_compared_in_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(9, 40, generator=rng).bfloat16()
    w = (z.float() + 0.1 * torch.randn(9, 40, generator=rng)).bfloat16()
    found = compare_outputs(clean_output(z, torch.zeros(9, dtype=torch.long)), w)["kl"]
    p, q = z.double().log_softmax(-1), w.double().log_softmax(-1)
    torch.testing.assert_close(found, (p.exp() * (p - q)).sum(-1), rtol=1e-9, atol=1e-12)
    moved = compare_states(z, w)
    torch.testing.assert_close(moved["state_distance"], (z.double() - w.double()).norm(dim=-1))
    assert (moved["state_cosine"] < 1).all()
