"""GGUF files of several architectures load by their path, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from geomstats_lm import describe_model, load_model
from geomstats_lm.blocks import UnsupportedModelError, capture
from tests.gguf_samples import small_model, write_gguf

IDS = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_unquantized_files_give_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    model, path = small_model(family), tmp_path / f"small-{family}.gguf"
    write_gguf(path, family, model)
    lm = load_model(path)
    assert (lm.name, lm.n_layers, lm.dim) == (f"small-{family}", 3, 32)
    assert lm.attrs["dequantized"] == 1 and lm.attrs["model_type"] == family
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    torch.testing.assert_close(capture(lm, IDS)[1], expected, rtol=1e-4, atol=1e-4)
    assert lm.tokenizer("ab")["input_ids"][-1] == 256
    page = describe_model(path)
    assert page.facts["weights"] == "not read" and page.facts["n_layers"] == 3
    assert page.facts["n_parameters"] == lm.attrs["n_parameters"]


def test_weights_of_another_shape_than_the_header_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    write_gguf(path, "gpt2", small_model("gpt2", n_positions=64))
    with pytest.raises(UnsupportedModelError, match=r"short\.gguf: 1 weights.*wpe.*\(64, 32\)"):
        load_model(path)


def test_other_architectures_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, "plamo", small_model("llama"))
    with pytest.raises((UnsupportedModelError, FileNotFoundError), match=r"plamo"):
        load_model(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises((UnsupportedModelError, FileNotFoundError), match=r"other\.gguf"):
        load_model(path)
    path.write_bytes(b"no model at all")
    with pytest.raises((UnsupportedModelError, FileNotFoundError), match=r"other\.gguf"):
        load_model(path)
