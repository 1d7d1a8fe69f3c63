"""Any causal model as a stack of blocks: what is read, what is replaced, what is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from geomstats_lm.blocks import (
    UnsupportedModelError,
    appends_exactly,
    capture,
    resume,
    resume_single,
)
from geomstats_lm.models import as_language_model, load_model, parameter_checksum
from tests.families import random_model
from tests.model_samples import tiny_bert, tiny_gpt2

STORIES = Path("../shared/data/models/stories260K")
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gpt_neox", "opt", "falcon", "phi", "gemma3_text", "openai-gpt", "xlstm", "jamba"],
)
def test_family_is_read_and_resumed(family: str) -> None:
    """h_L through final norm and head is the output; an unchanged patch changes nothing."""
    lm = random_model(family)
    ids = IDS % lm.vocabulary
    states, logits = capture(lm, ids)
    assert len(states) == lm.n_layers + 1
    for layer in range(1, lm.n_layers + 1):
        assert torch.equal(resume(lm, ids, layer, states[layer]), logits)
    # brute force: the block's output changed by a hook, nothing skipped
    layer = lm.n_layers - 1
    patched = states[layer].clone()
    patched[:, 5] += torch.randn(lm.dim, generator=torch.Generator().manual_seed(0))
    expected = _hooked(lm, ids, layer, patched)
    found = resume(lm, ids, layer, patched)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[:, 5:], logits[:, 5:], atol=1e-4)
    if lm.causal:
        torch.testing.assert_close(found[:, :5], logits[:, :5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma2", "mixtral"])
def test_appended_single_positions_are_exact(family: str) -> None:
    lm = random_model(family)
    ids = IDS % lm.vocabulary
    states, _ = capture(lm, ids)
    assert appends_exactly(lm, ids, states)
    rows = torch.tensor([[1, 4, 4], [11, 0, 7]])
    patch = torch.randn(2, 3, lm.dim, generator=torch.Generator().manual_seed(0))
    quick = resume_single(lm, ids, 1, states[1], patch, rows)
    for i in range(2):
        for j in range(3):
            state = states[1][i : i + 1].clone()
            state[0, rows[i, j]] = patch[i, j]
            slow = resume(lm, ids[i : i + 1], 1, state)[0, rows[i, j]]
            torch.testing.assert_close(quick[i, j], slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "bloom", "jamba"])
def test_models_that_cannot_append_are_known(family: str) -> None:
    """Recurrent mixers and ALiBi do not read position ids; appending would be silently wrong."""
    lm = random_model(family)
    ids = IDS % lm.vocabulary
    assert not appends_exactly(lm, ids, capture(lm, ids)[0])


def test_last_state_is_before_the_final_norm() -> None:
    lm = tiny_gpt2()
    states, logits = capture(lm, IDS)
    inner = lm.model.transformer
    torch.testing.assert_close(lm.model.lm_head(inner.ln_f(states[-1])), logits)
    theirs = lm.model(IDS, output_hidden_states=True).hidden_states[-1]
    assert not torch.allclose(theirs, states[-1], atol=1e-3)  # the trap


def test_rwkv_is_not_rescaled() -> None:
    """RWKV in evaluation mode halves the stream every ``rescale_every`` blocks by itself."""
    torch.manual_seed(0)
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=60,
        hidden_size=16,
        attention_hidden_size=16,
        num_hidden_layers=3,
        rescale_every=1,
    )
    reference = RwkvForCausalLM(config)
    reference.train()  # training mode does not rescale
    with torch.no_grad():
        expected = reference(IDS).logits
    lm = as_language_model(reference)
    torch.testing.assert_close(capture(lm, IDS)[1], expected, rtol=1e-4, atol=1e-4)


def test_hooks_are_gone_and_parameters_unchanged_after_an_exception() -> None:
    lm = tiny_gpt2()
    before = parameter_checksum(lm)
    with pytest.raises(IndexError):
        capture(lm, IDS + 10_000)
    states, _ = capture(lm, IDS)
    with pytest.raises(IndexError):
        resume(lm, IDS + 10_000, 2, states[2])
    with pytest.raises(ValueError, match=r"layer=9"):
        resume(lm, IDS, 9, states[2])
    with pytest.raises(ValueError, match="state has shape"):
        resume(lm, IDS, 2, states[2][:, :3])
    for module in lm.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__
    assert parameter_checksum(lm) == before


def test_models_that_are_no_stack_are_refused_by_reason() -> None:
    lm = tiny_gpt2()
    lm.model.config.n_layer = 7
    with pytest.raises(UnsupportedModelError, match="no list of 7 blocks"):
        as_language_model(lm.model)
    meddled = tiny_gpt2().model
    meddled.transformer.h[1].register_forward_pre_hook(lambda m, args: (args[0] * 0.5, *args[1:]))
    with pytest.raises(UnsupportedModelError, match="something acts on the state between blocks"):
        as_language_model(meddled)


def test_encoders_and_headless_models_can_be_read() -> None:
    assert not tiny_bert().causal
    headless = tiny_gpt2(head=False)
    assert headless.causal and headless.vocabulary == 0


def test_missing_models_say_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model folder or file"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="dtype='float8'"):
        load_model(tmp_path, dtype="float8")


@pytest.mark.skipif(not STORIES.exists(), reason="the shared pretrained model is not here")
def test_pretrained_llama_loads_and_fresh_weights_are_seeded() -> None:
    lm = load_model(STORIES)
    assert (lm.name, lm.n_layers, lm.dim, lm.vocabulary) == ("stories260K", 5, 64, 512)
    fresh = [load_model(STORIES, untrained=True, seed=s) for s in (0, 0, 1)]
    assert fresh[0].name == "stories260K-untrained" and fresh[0].attrs["untrained"] == 1
    sums = [parameter_checksum(m) for m in (lm, *fresh)]
    assert sums[1] == sums[2] and len(set(sums)) == 3


def _hooked(lm, ids, layer, state):
    def replace(module, args, output):
        return (state, *output[1:]) if isinstance(output, (tuple, list)) else state

    handle = lm.blocks[layer - 1].register_forward_hook(replace)
    try:
        with torch.no_grad():
            return lm.model(input_ids=ids).logits
    finally:
        handle.remove()


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw the missing ones at random, and the study would look real."""
    import json

    from tests.text_samples import character_tokenizer

    tiny_gpt2(vocab_size=128).model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path).n_layers == 4
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 5}))
    with pytest.raises(UnsupportedModelError, match=r"lacks \d+ of the weights.*h\.4\."):
        load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UnsupportedModelError, match="weights cannot be loaded"):
        load_model(tmp_path)


def test_weights_that_are_not_finite_are_named() -> None:
    broken = tiny_gpt2().model
    broken.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"after blocks \[2, 3, 4\] are not finite"):
        as_language_model(broken)


def test_short_contexts_are_checked_within_themselves() -> None:
    assert tiny_gpt2(n_positions=4).n_layers == 4


def test_any_failure_of_the_check_is_a_refusal_with_its_reason() -> None:
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        is_decoder=True, hidden_size=16, attn_layers=["local", "local"], num_hidden_layers=2,
        num_attention_heads=2, attention_head_size=8, feed_forward_size=16, vocab_size=60,
        axial_pos_embds=False, local_attn_chunk_length=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="ReformerModelWithLMHead"):
        as_language_model(ReformerModelWithLMHead(config))
    broken = tiny_gpt2().model
    del broken.transformer.h[1].mlp
    with pytest.raises(UnsupportedModelError, match="AttributeError: .*has no attribute 'mlp'"):
        as_language_model(broken)


def test_a_name_with_one_slash_may_be_folder_or_hub_id(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder 'models/none' here.*as a hub id"):
        load_model("models/none")
    with pytest.raises(FileNotFoundError, match="no model folder or file"):
        load_model("models/")
    (tmp_path / "weights.bin").write_bytes(b"0")
    with pytest.raises(FileNotFoundError, match=r"weights\.bin is a file, but no \.gguf"):
        load_model("weights.bin")


@pytest.mark.parametrize("place", ["auto", {"": "cpu"}, "two", {"": "disk"}])
def test_placed_modules_give_the_same_states_and_checksum(place, tmp_path: Path) -> None:
    """What is kept on disk runs like what is in memory; several devices are the same mechanism."""
    from geomstats_lm.parts import capture_parts, find_parts
    from tests.text_samples import character_tokenizer

    plain = tiny_gpt2(vocab_size=128)
    plain.model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    if place == "two":
        place = {f"transformer.h.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
        modules = ("wte", "wpe", "drop", "ln_f")
        place |= {f"transformer.{name}": "cpu" for name in modules} | {"lm_head": "cpu"}
    lm = load_model(tmp_path, device_map=place)
    assert parameter_checksum(lm) == parameter_checksum(plain)
    (states, logits), (expected, output) = capture(lm, IDS), capture(plain, IDS)
    assert torch.equal(logits, output)
    assert all(torch.equal(a, b) for a, b in zip(states, expected))
    assert torch.equal(resume(lm, IDS, 2, states[2]), output)
    found, known = (capture_parts(m, IDS, find_parts(m)) for m in (lm, plain))
    assert torch.equal(found[0][3], known[0][3])


@pytest.mark.parametrize(("options", "match"), [
    ({"device_map": "everywhere"}, "device_map='everywhere': accepted are auto"),
    ({"device_map": {"": "meta"}}, "'' on 'meta' would have no weights"),
    ({"device_map": {"": 7}}, "cuda:7.*no CUDA device"),
    ({"device_map": "auto", "device": "cuda"}, "no CUDA device|give one of them"),
    ({"device_map": "auto", "untrained": True}, "fresh weights are drawn on one device"),
])  # fmt: skip
def test_placements_that_cannot_be_are_refused(options, match, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        load_model(tmp_path, **options)
