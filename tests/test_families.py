"""The families that can be read and patched, as the stored table says, and the others by reason."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from geomstats_lm.blocks import (
    UnsupportedModelError,
    apply_head,
    capture,
    capture_final,
    resume,
    resume_final,
)
from geomstats_lm.patching import patch_single
from tests.families import FAMILIES, MIXERS, REFUSED, TABLE, contract_row, random_model

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
STORED = pd.read_csv(TABLE, keep_default_na=False).set_index("family")
# one of each mixer that a batch of single positions, or appended ones, may be run through
USUAL = ["gpt2", "llama", "bloom", "mixtral", "mamba2", "rwkv", "bamba"]


def test_table_holds_every_family() -> None:
    assert sorted(STORED.index) == sorted([*FAMILIES, *REFUSED])
    assert (STORED["extract"] == "yes").sum() >= 70
    assert set(STORED["mixer"]) == {*MIXERS, ""}


@pytest.mark.parametrize("family", USUAL)
def test_usual_families_do_as_the_table_says(family: str) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(USUAL)))
def test_every_family_does_as_the_table_says(family: str) -> None:
    check(family)


@pytest.mark.parametrize("family", REFUSED)
def test_refused_families_say_why(family: str) -> None:
    with pytest.raises(UnsupportedModelError):
        random_model(family)
    assert contract_row(family) == {"family": family, **STORED.loc[family]}


def check(family: str) -> None:
    assert contract_row(family) == {"family": family, **STORED.loc[family]}
    lm = random_model(family)
    states, final = capture_final(lm, IDS)
    _, logits = capture(lm, IDS)
    # final states through the head, its scales and caps included, are the model's output
    torch.testing.assert_close(
        apply_head(lm, final.reshape(-1, final.shape[-1])).reshape(logits.shape), logits,
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    for layer in range(1, lm.n_layers + 1):
        assert torch.equal(resume(lm, IDS, layer, states[layer]), logits)
        assert torch.equal(resume_final(lm, IDS, layer, states[layer]), final)
    # single positions against one plain forward each, the block's output changed by a hook
    mask = np.zeros(IDS.numel(), dtype=bool)
    mask[[3, 7, 20]] = True
    off = np.random.default_rng(0).standard_normal((IDS.numel(), lm.dim))
    appends = STORED.loc[family, "single_position"] == "appended"
    (single,) = patch_single(
        lm, IDS, 1, states[1], [off], mask, appends=appends, batch_size=2
    )  # fmt: skip
    found = apply_head(lm, single)
    for row, token in zip(found, np.flatnonzero(mask)):
        given = states[1].clone().reshape(-1, lm.dim)
        given[token] -= torch.from_numpy(off[token]).float()
        expected = hooked(lm, 1, given.reshape(states[1].shape)).reshape(-1, lm.vocabulary)[token]
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=2e-5)
        assert not torch.allclose(row, logits.reshape(-1, lm.vocabulary)[token], atol=1e-3)


def hooked(lm, layer, state):
    def replace(module, args, output):
        return (state, *output[1:]) if isinstance(output, (tuple, list)) else state

    handle = lm.blocks[layer - 1].register_forward_hook(replace)
    try:
        with torch.no_grad():
            return lm.model(input_ids=IDS).logits
    finally:
        handle.remove()
