"""Mixer and MLP add up to the update in every family that adds them, others are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from geomstats_lm import decompose, extract, open_study
from geomstats_lm.blocks import UnsupportedModelError, capture
from geomstats_lm.parts import Contributions, capture_parts, extract_parts, find_parts
from geomstats_lm.parts_geometry import parts_geometry
from tests.families import random_model
from tests.model_samples import random_windows, tiny_gpt2

# family -> names of the modules whose outputs are the contributions
PLACES = {
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),  # both from the same state
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),  # modules add the state themselves
    "opt": ("self_attn", "fc2"),  # no module of its own for the MLP
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),  # norms before adding
    "mixtral": ("self_attn", "mlp"),
    "granite": ("self_attn", "mlp"),
    "mamba": ("mixer", ""),
}


@pytest.mark.parametrize("family", PLACES)
def test_parts_are_found_and_add_up(family) -> None:
    model = random_model(family)
    where = find_parts(model)
    assert {(p.mixer, p.mlp) for p in where} == {PLACES[family]}
    ids = torch.randint(0, 99, (2, 7), generator=torch.Generator().manual_seed(3))
    mixer, mlp = capture_parts(model, ids, where)
    states = capture(model, ids, head=False)[0]
    for layer in range(model.n_layers):
        update = states[layer + 1] - states[layer]
        # float32 sums in another order, of states as large as the update
        torch.testing.assert_close(mixer[layer] + mlp[layer], update, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("openai-gpt", "OpenAIGPTLMHeadModel"), ("rwkv", "RwkvForCausalLM")],
)
def test_families_that_normalize_the_state_itself_are_refused_by_name(family, architecture) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*cannot be told apart"):
        find_parts(random_model(family))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gptj", "codegen", "falcon", "mpt", "llama", "qwen3", "gemma3_text", "phi", "olmo2",
        "cohere", "glm4", "stablelm", "nemotron", "xglm", "biogpt", "mamba2", "recurrent_gemma",
        "jamba",
    ],
)  # fmt: skip
def test_more_families_add_up(family) -> None:
    model = random_model(family)
    where = find_parts(model)
    ids = torch.randint(0, 99, (2, 8), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[:, -2] = (changed[:, -2] + 1) % 99
    first, again = (capture_parts(model, i, where) for i in (ids, changed))
    states = [capture(model, i, head=False)[0] for i in (ids, changed)]
    torch.testing.assert_close(
        first[0][0] + first[1][0], states[0][1] - states[0][0], rtol=1e-3, atol=1e-4
    )
    # another token before it reaches the last one through the mixer of the first block
    assert not torch.allclose(first[0][0][:, -1], again[0][0][:, -1], rtol=1e-6, atol=1e-7)
    if family in ("gptj", "codegen", "falcon", "phi", "cohere"):  # its MLP reads the same state
        torch.testing.assert_close(first[1][0][:, -1], again[1][0][:, -1])


def test_extracted_parts_are_those_of_the_windows_and_resume(tmp_path) -> None:
    model, store = tiny_gpt2(), tmp_path / "s.zarr"
    activations = extract(model, random_windows(), store=store, progress=False)
    node = open_study(store)[model.key]
    stored = extract_parts(model, node, store=store, progress=False)
    memory = extract_parts(model, activations)
    xr.testing.assert_allclose(stored.compute(), memory)
    hidden = activations.hidden.sel(token=memory.token).compute()
    update = hidden.diff("layer").values
    np.testing.assert_allclose((memory.mixer + memory.mlp).values, update, atol=1e-5)
    assert (memory.split == 1).all() and memory.mixer.dims == ("model", "layer", "token", "dim")
    again = extract_parts(model, open_study(store)[model.key], store=store, progress=False)
    xr.testing.assert_identical(again.compute(), stored.compute())
    other = tiny_gpt2(seed=1)
    with pytest.raises(ValueError, match="not the one whose activations"):
        extract_parts(other, activations)
    with pytest.raises(ValueError, match="tokens='some'"):
        extract_parts(model, activations, tokens="some")


def test_without_mlp_the_update_is_the_mixers() -> None:
    model = tiny_gpt2()
    for block in model.blocks:
        block.mlp.c_proj.weight.data.zero_()
        block.mlp.c_proj.bias.data.zero_()
    assert find_parts(model) == (Contributions("attn", ""),) * 4
    activations = extract(model, random_windows(), progress=False)
    parts = extract_parts(model, activations)
    measured = parts_geometry(decompose(activations, ["mean", "identity"], k=4).compute(), parts)
    np.testing.assert_allclose(measured.energy_mixer, 1, rtol=1e-4)
    assert (measured.energy_mlp == 0).all()
    usable = measured.usable.values
    np.testing.assert_allclose(measured.share_mixer_update.values[usable], 1, rtol=1e-3)
    identity = measured.sel(function_class="identity")  # its residual is the update
    np.testing.assert_allclose(identity.cos_residual_mixer.values[usable], 1, rtol=1e-3)
    assert identity.cos_residual_mlp.isnull().all()


def test_parts_of_other_tokens_are_refused() -> None:
    model = tiny_gpt2()
    activations = extract(model, random_windows(), progress=False)
    parts = extract_parts(model, activations, tokens="reference")
    evaluation = decompose(activations, ["mean"], k=4).compute()
    with pytest.raises(ValueError, match="tokens of the decomposition are not there"):
        parts_geometry(evaluation, parts)
    with pytest.raises(ValueError, match="parts: give what"):
        parts_geometry(evaluation)
