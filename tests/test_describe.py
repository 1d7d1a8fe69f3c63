"""The page of a model says what its modules say, and its verbs do what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from geomstats_lm import decompose, describe_model, extract
from geomstats_lm.blocks import UnsupportedModelError, capture
from geomstats_lm.cli import app
from geomstats_lm.datasets import example_path, load_example
from geomstats_lm.parts import extract_parts
from tests.families import random_model
from tests.model_samples import random_windows, tiny_bert, tiny_gpt2
from tests.text_samples import character_tokenizer

VERBS = ["extract", "perturb_all", "perturb_single", "parts", "self_only"]


def test_page_of_a_folder_needs_no_weights(tmp_path: Path) -> None:
    tiny_gpt2(vocab_size=128).model.save_pretrained(tmp_path)
    character_tokenizer(bos=True).save_pretrained(tmp_path)
    loaded = {k: v for k, v in described(tmp_path).items() if k not in ("weights", "device")}
    (tmp_path / "model.safetensors").unlink()
    facts = described(tmp_path)
    assert facts == {**loaded, "weights": "not read", "device": "not loaded"}
    assert (facts["architecture"], facts["n_layers"], facts["dim"]) == ("GPT2LMHeadModel", 4, 16)
    assert (facts["vocabulary"], facts["context"], facts["tied"]) == (128, 32, True)
    assert (facts["block"], facts["mixer"], facts["mlp"]) == ("GPT2Block", "attn", "mlp")
    assert facts["n_parameters"] == sum(
        p.numel() for p in tiny_gpt2(vocab_size=128).model.parameters()
    )
    assert facts["bos"] == "<s> is put before a text"


def described(model):
    return describe_model(model).facts


@pytest.mark.parametrize(("family", "norm"), [
    ("gpt2", "transformer.ln_f"), ("llama", "model.norm"), ("mamba", "backbone.norm_f"),
    ("openai-gpt", "none"),
])  # fmt: skip
def test_final_norm_is_what_stands_before_the_head(family: str, norm: str) -> None:
    lm = random_model(family)
    assert describe_model(lm).facts["final_norm"] == norm
    if norm != "none":
        states, logits = capture(lm, torch.tensor([[5, 7, 11]]))
        with torch.no_grad():
            normed = lm.model.get_submodule(norm)(states[-1])
            torch.testing.assert_close(lm.model.get_output_embeddings()(normed), logits)


def test_verbs_do_what_the_page_says() -> None:
    for lm in (tiny_gpt2(), tiny_gpt2(head=False), tiny_bert(), random_model("rwkv")):
        can = {verb.verb: verb for verb in describe_model(lm).verbs}
        assert list(can) == VERBS
        assert can["perturb_all"].supported == lm.causal
        assert all(v.how for v in can.values() if not v.supported)
        activations = extract(lm, random_windows(), progress=False)
        assert ("loss" in activations) == (can["extract"].how == "states and loss")
        if can["parts"].supported:
            extract_parts(lm, activations)
        else:
            with pytest.raises(UnsupportedModelError):
                extract_parts(lm, activations)
        if can["self_only"].supported:
            decompose(activations, ["self_only"], k=2, model=lm).compute()


def test_a_model_that_is_no_stack_is_described_with_the_reason(tmp_path: Path) -> None:
    from transformers import XLNetConfig

    XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=16, vocab_size=60).save_pretrained(
        tmp_path
    )
    page = describe_model(tmp_path)
    assert not page.tidy()[VERBS].any(axis=None)
    assert "has shape (9, 2, 16), not (batch, position, 16)" in page.verbs[0].how
    assert page.facts["bos"] == "no tokenizer"


def test_page_and_row_hold_the_same() -> None:
    page = describe_model(load_example("gpt2"))
    row = page.tidy()
    assert len(row) == 1 and row["n_parameters"][0] == page.facts["n_parameters"]
    assert f"{page.facts['n_parameters']:,}" in str(page) and repr(page) == str(page)
    result = CliRunner().invoke(app, ["describe", str(example_path("gpt2"))])
    assert result.exit_code == 0, result.output
    assert "final_norm      transformer.ln_f" in result.output
    assert "perturb_single  yes: all in one pass" in result.output
