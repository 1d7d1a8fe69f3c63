"""Small random models and windows of random tokens, made in milliseconds."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from geomstats_lm.models import as_language_model
from tests.cube_samples import token_labels


def tiny_gpt2(*, head: bool = True, seed: int = 0, name: str = "tiny", **config):
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    shape = {
        "n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 60, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (GPT2LMHeadModel if head else GPT2Model)(GPT2Config(**(shape | config)))
    return as_language_model(model, name=name)


def tiny_bert(*, head: bool = False, seed: int = 0):
    from transformers import BertConfig, BertForMaskedLM, BertModel

    config = BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        vocab_size=60, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (BertForMaskedLM if head else BertModel)(config)
    return as_language_model(model, name="encoder")


def random_windows(n_windows: int = 12, length: int = 8, *, vocabulary: int = 60, seed: int = 0):
    """Windows as a corpus gives them; two thirds reference."""
    labels = token_labels(n_windows * length, length, n_windows * 2 // 3 * length)
    ids = np.random.default_rng(seed).integers(0, vocabulary, n_windows * length)
    labels["token_id"] = ("token", ids.astype(np.int32))
    return xr.Dataset(
        coords=labels,
        attrs={
            "window_length": length, "n_windows": n_windows, "text_checksum": "none",
            "split_seed": 0,
        },
    )  # fmt: skip
