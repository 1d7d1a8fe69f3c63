"""What families do to the state in their own way, each against a number computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from geomstats_lm.blocks import UnsupportedModelError, capture, resume, state_of
from geomstats_lm.contract import as_language_model
from geomstats_lm.corpus import read_corpus, windows
from geomstats_lm.parts import capture_parts, find_parts
from tests.families import random_model
from tests.text_samples import STORIES, character_tokenizer

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def close(found: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 1e-5, "atol": 1e-5} | tolerance))


def changed_by(lm, position: int) -> torch.Tensor:
    """By how much each position's last state changes with the token at one position."""
    other = IDS.clone()
    other[:, position] = (other[:, position] + 1) % 60
    last, again = (capture(lm, ids, head=False)[0][-1] for ids in (IDS, other))
    return (last - again).norm(dim=-1)[0]


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemma_scales_its_embedding_before_the_first_block(family: str) -> None:
    lm = random_model(family)
    weight = lm.model.get_input_embeddings().weight
    assert lm.dim == 32
    close(capture(lm, IDS)[0][0], weight[IDS] * math.sqrt(32))


def test_granite_scales_by_what_its_config_says_before_and_within_blocks() -> None:
    lm = random_model("granite")
    config = lm.model.config
    states = capture(lm, IDS)[0]
    close(states[0], lm.model.get_input_embeddings().weight[IDS] * config.embedding_multiplier)
    assert find_parts(lm)[0].scale == config.residual_multiplier


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("gemma2", ("post_attention_layernorm", "post_feedforward_layernorm")),
        ("gemma3_text", ("post_attention_layernorm", "post_feedforward_layernorm")),
        ("olmo2", ("post_attention_layernorm", "post_feedforward_layernorm")),
    ],
)
def test_post_norms_belong_to_what_is_added(family: str, norms: tuple[str, str]) -> None:
    """The update is the two normalized outputs; without their norms the sum is another one."""
    lm = random_model(family)
    places = find_parts(lm)
    assert {(p.mixer, p.mlp) for p in places} == {norms}
    states = capture(lm, IDS, head=False)[0]
    mixer, mlp = capture_parts(lm, IDS, places)
    for layer in range(lm.n_layers):
        update = states[layer + 1] - states[layer]
        close(mixer[layer] + mlp[layer], update, rtol=1e-3, atol=1e-4)
    raw: list[torch.Tensor] = []
    block = lm.blocks[0]
    handles = [
        module.register_forward_hook(lambda m, a, out: raw.append(state_of(out)))
        for module in (block.self_attn, block.mlp)
    ]
    capture(lm, IDS, head=False)
    for handle in handles:
        handle.remove()
    update = states[1] - states[0]
    assert float((sum(raw) - update).norm() / update.norm()) > 0.1


@pytest.mark.parametrize(("family", "attention", "norm"), [
    ("gptj", "attn", "ln_1"), ("phi", "self_attn", "input_layernorm"),
    ("gpt_neox", "attention", "post_attention_layernorm"),
    ("falcon", "self_attention", "input_layernorm"), ("cohere", "self_attn", "input_layernorm"),
])  # fmt: skip
def test_parallel_residual_gives_the_mlp_the_state_before_attention(family, attention, norm):
    lm = random_model(family)
    block, states = lm.blocks[1], capture(lm, IDS, head=False)[0]
    with torch.no_grad():
        expected = block.mlp(getattr(block, norm)(states[1]))
    mixer, mlp = capture_parts(lm, IDS, find_parts(lm))
    close(mlp[1], state_of(expected), rtol=1e-4)
    close(mixer[1], states[2] - states[1] - state_of(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "kind"), [
    ("bloom", tuple), ("falcon", tuple), ("rwkv", tuple), ("llama", torch.Tensor),
    ("mamba", torch.Tensor),
])  # fmt: skip
def test_tuple_and_tensor_blocks_are_wrapped_again(family: str, kind: type) -> None:
    lm = random_model(family)
    returned: list[object] = []
    handle = lm.blocks[1].register_forward_hook(lambda m, a, out: returned.append(out))
    states, logits = capture(lm, IDS)
    handle.remove()
    assert isinstance(returned[0], kind) == (lm.block_rest[1] is not None or kind is torch.Tensor)
    doubled = resume(lm, IDS, 2, 2 * states[2])
    assert torch.equal(resume(lm, IDS, 2, states[2]), logits)
    assert float((doubled - logits).abs().max()) > 1e-3


def test_sliding_window_ends_where_the_config_says() -> None:
    """Three layers of window 3 reach back 3 x 2 positions, no further; full ones reach all."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    window = as_language_model(MistralForCausalLM(MistralConfig(**shape, sliding_window=3)))
    full = as_language_model(MistralForCausalLM(MistralConfig(**shape, sliding_window=None)))
    reached = changed_by(window, 2)
    assert (reached[2:9] > 1e-6).all()  # 2 + 3 * (3 - 1) = 8 is the last one
    assert torch.equal(reached[9:], torch.zeros(3))
    assert (changed_by(full, 2)[2:] > 1e-6).all()


def test_hybrid_blocks_mix_in_turn() -> None:
    """A convolution of three reaches two back; one block of attention among them reaches all."""
    lm = random_model("lfm2")
    states = [capture(lm, ids, head=False)[0] for ids in (IDS, _other(2))]
    reach = [(a - b).abs().amax(dim=-1)[0] > 0 for a, b in zip(*states)]
    assert reach[0].nonzero().ravel().tolist() == [2]
    assert reach[1].nonzero().ravel().tolist() == [2, 3, 4]
    assert reach[2][2:].all() and not reach[3][:2].any()


def _other(position: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[:, position] = (ids[:, position] + 1) % 60
    return ids


def test_shared_blocks_count_once_a_layer_and_their_weights_once() -> None:
    """Zamba's attention is one set of weights in several blocks."""
    lm = random_model("zamba2")
    assert lm.n_layers == 3 and len({id(block) for block in lm.blocks}) == 3
    twice = tiny_shared()
    with pytest.raises(UnsupportedModelError, match=r"ran in the order \[2, 2\]|not each once"):
        as_language_model(twice)


def tiny_shared():
    from tests.model_samples import tiny_gpt2

    model = tiny_gpt2(n_layer=2).model
    model.transformer.h[0] = model.transformer.h[1]  # one block, run twice
    return model


def test_experts_take_few_tokens_each_and_still_add_up() -> None:
    lm = random_model("mixtral")
    mixer, mlp = capture_parts(lm, IDS, find_parts(lm))
    states = capture(lm, IDS, head=False)[0]
    block = lm.blocks[0]
    with torch.no_grad():
        after = block.post_attention_layernorm(states[0] + mixer[0])
        close(state_of(block.mlp(after)), mlp[0], rtol=1e-4)
        # a token's experts do not depend on the tokens beside it
        alone = torch.cat([state_of(block.mlp(after[:1, i : i + 1])) for i in range(12)], dim=1)
    close(alone, mlp[0][:1], rtol=1e-4)


def test_tied_weights_are_one_parameter() -> None:
    lm = random_model("gemma")
    model = lm.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    assert lm.attrs["n_parameters"] == sum(p.numel() for p in model.parameters())
    states, logits = capture(lm, IDS)
    with torch.no_grad():
        close(model.model.norm(states[-1]) @ model.get_input_embeddings().weight.T, logits)


def test_encoder_decoders_are_refused_and_their_decoders_are_not() -> None:
    from transformers import BartConfig, BartForCausalLM, BartForConditionalGeneration

    shape = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 16,
        "encoder_ffn_dim": 16, "decoder_attention_heads": 2, "encoder_attention_heads": 2,
        "vocab_size": 60,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="bart is an encoder-decoder; causal decoders"):
        as_language_model(BartForConditionalGeneration(BartConfig(**shape)))
    decoder = as_language_model(BartForCausalLM(BartConfig(**shape)))
    assert decoder.n_layers == 3 and decoder.causal  # the encoder's depth is another


def test_without_bos_a_window_starts_with_text() -> None:
    tokenizer = character_tokenizer()
    cut = windows(read_corpus(list(STORIES)), tokenizer, length=8, n_windows=(4, 2))
    first = cut.isel(token=cut.position == 0)
    assert not first.is_special.any()
    assert (first.char_end > first.char_start).all()  # a character of the text, not an added token
