"""Which architectures are compared, at matched size?

    6 blocks x 192 dims, vocabulary 4096 = embedding 0.79 M + blocks about 1.8 to 2.7 M parameters

Every model is built by the transformers library from a configuration alone, weights drawn by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from encode_text import VOCABULARY

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
CONTEXT = 256


def build(name: str, seed: int) -> transformers.PreTrainedModel:
    """Return the untrained model of one architecture, its weights drawn by seed."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model {name!r} is not known; known are {', '.join(ARCHITECTURES)}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]())
    model.config.use_cache = False  # training and evaluation read whole windows
    return model


def _gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        **SHARED,
        n_positions=CONTEXT,
        n_embd=192,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def _mamba2() -> transformers.PretrainedConfig:
    return transformers.Mamba2Config(
        **SHARED,
        pad_token_id=0,
        hidden_size=192,
        num_hidden_layers=6,
        expand=3,
        head_dim=48,
        num_heads=12,
        n_groups=1,
        state_size=32,
        chunk_size=32,
    )


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        **SHARED,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=CONTEXT,
    )


def _gpt_neox() -> transformers.PretrainedConfig:
    return transformers.GPTNeoXConfig(
        **SHARED,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=CONTEXT,
    )


def _rwkv() -> transformers.PretrainedConfig:
    return transformers.RwkvConfig(
        **SHARED,
        context_length=CONTEXT,
        hidden_size=192,
        attention_hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        rescale_every=0,  # else evaluation halves the stream, for float16 overflow, every 6 blocks
    )


def _hybrid() -> transformers.PretrainedConfig:
    # Bamba: Mamba-2 blocks, the third and the sixth with attention instead; an MLP in each.
    return transformers.BambaConfig(
        **SHARED,
        pad_token_id=0,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        attn_layer_indices=[2, 5],
        mamba_expand=2,
        mamba_n_heads=8,
        mamba_d_head=48,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_chunk_size=32,
        max_position_embeddings=CONTEXT,
    )


ARCHITECTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt2": _gpt2,
    "mamba2": _mamba2,
    "llama": _llama,
    "gpt_neox": _gpt_neox,
    "rwkv": _rwkv,
    "hybrid": _hybrid,
}
