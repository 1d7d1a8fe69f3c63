"""The block alone, against attention masked to the diagonal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geomstats_lm import self_only
from geomstats_lm.blocks import capture, state_of
from geomstats_lm.decompose import decompose
from geomstats_lm.extract import extract
from geomstats_lm.models import as_language_model
from tests.model_samples import random_windows, tiny_gpt2


def tiny(family):
    import transformers as t

    shape = {"vocab_size": 60, "num_hidden_layers": 3, "hidden_size": 32}
    heads = {"num_attention_heads": 4, "intermediate_size": 48}
    made = {
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**shape, **heads)),
        "neox": lambda: (t.GPTNeoXForCausalLM, t.GPTNeoXConfig(**shape, **heads)),
        "qwen": lambda: (
            t.Qwen3ForCausalLM, t.Qwen3Config(**shape, **heads, head_dim=8, num_key_value_heads=2)
        ),
        "gemma": lambda: (
            t.Gemma3ForCausalLM,
            t.Gemma3TextConfig(**shape, **heads, head_dim=8, num_key_value_heads=2),
        ),
        "bloom": lambda: (
            t.BloomForCausalLM, t.BloomConfig(vocab_size=60, hidden_size=32, n_layer=3, n_head=4)
        ),
        "mamba": lambda: (t.MambaForCausalLM, t.MambaConfig(**shape, state_size=4)),
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind, config = made[family]()
        return as_language_model(kind(config), name=family)


def masked_to_the_diagonal(model, ids, layer, state):
    """h_layer from h_{layer-1} in the whole window, every token attending to itself only."""
    n = ids.shape[1]
    mask = torch.full((n, n), torch.finfo(torch.float32).min).fill_diagonal_(0)
    mask = mask[None, None].expand(len(ids), 1, n, n)
    given = {"attention_mask": {"full_attention": mask, "sliding_attention": mask}}
    if model.name != "gemma":
        given = {"attention_mask": mask}
    seen = []
    block = model.blocks[layer - 1]

    def before(module, args, kwargs):
        if args:
            return (state, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": state}

    first = block.register_forward_pre_hook(before, with_kwargs=True)
    second = block.register_forward_hook(lambda m, a, out: seen.append(state_of(out).clone()))
    try:
        with torch.no_grad():
            model.model(input_ids=ids, **given)
    finally:
        first.remove()
        second.remove()
    return seen[0].numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "qwen", "gemma"])
def test_a_block_alone_is_its_attention_masked_to_the_diagonal(family):
    model = tiny_gpt2() if family == "gpt2" else tiny(family)
    ids = torch.randint(0, 60, (3, 10), generator=torch.Generator().manual_seed(1))
    states = capture(model, ids)[0]
    for layer in (1, model.n_layers):
        expected = masked_to_the_diagonal(model, ids, layer, states[layer - 1])
        flat = states[layer - 1].reshape(-1, model.dim).numpy()
        alone = self_only.run_block(model, layer, flat, ids.numpy().ravel())
        # one kernel of float32 sums against another
        assert np.allclose(alone, expected.reshape(alone.shape), rtol=1e-4, atol=1e-5)
        assert not np.allclose(alone, states[layer].reshape(alone.shape), atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "mamba"])
def test_the_first_token_of_a_window_has_no_context_to_miss(family):
    model = tiny_gpt2() if family == "gpt2" else tiny(family)
    ids = torch.randint(0, 60, (5, 7), generator=torch.Generator().manual_seed(2))
    states = capture(model, ids)[0]
    for layer in range(1, model.n_layers + 1):
        alone = self_only.run_block(
            model, layer, states[layer - 1][:, 0].numpy(), ids[:, 0].numpy()
        )
        assert np.allclose(alone, states[layer][:, 0], rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was_even_after_an_error():
    model = tiny_gpt2()
    ids = torch.arange(8)[None]
    clean = capture(model, ids)[1]
    with pytest.raises(ValueError, match=r"layers 1\.\.4"):
        self_only.run_block(model, 5, np.zeros((1, 16), np.float32), np.zeros(1, int))
    with pytest.raises(ValueError, match="16"):
        self_only.run_block(model, 1, np.zeros((1, 9), np.float32), np.zeros(1, int))
    self_only.run_block(model, 3, np.zeros((2, 16), np.float32), np.zeros(2, int))
    with pytest.raises(IndexError):
        self_only.run_block(model, 3, np.zeros((2, 16), np.float32), np.array([0, 99]))
    assert torch.equal(capture(model, ids)[1], clean)
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.model.modules()]
    assert not any(hooks)


def test_it_is_a_class_that_needs_the_model_it_came_from():
    model = tiny_gpt2()
    data = extract(model, random_windows(), progress=False)
    parts = decompose(data, ["self_only", "mean"], k=4, model=model).compute()
    first = parts.isel(token=parts.position.values == 0)
    # the state at a window's first position is all there is, so nothing is missed
    assert np.abs(first["residual"].sel(function_class="self_only")).max() < 1e-5
    rest = parts.isel(token=parts.position.values > 0)
    assert np.abs(rest["residual"].sel(function_class="self_only")).max() > 1e-3
    with pytest.raises(ValueError, match="runs the model's blocks"):
        decompose(data, ["self_only"], k=4)
    with pytest.raises(ValueError, match="is not the one"):
        decompose(data, ["self_only"], k=4, model=tiny_gpt2(seed=1))
