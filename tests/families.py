"""Random-weights instances of the model families that transformers ships."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from geomstats_lm.blocks import LanguageModel
from geomstats_lm.models import as_language_model

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SHORT = {"n_embd": 32, "n_layer": 3, "n_head": 4}
# family -> what it needs beside or instead of the common settings
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": SHORT, "gpt_neox": {}, "gptj": {**SHORT, "rotary_dim": 4}, "gpt_bigcode": SHORT,
    "codegen": {**SHORT, "rotary_dim": 4}, "openai-gpt": SHORT, "opt": {"ffn_dim": 64},
    "bloom": SHORT, "falcon": {}, "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3}, "llama": {},
    "mistral": {}, "mixtral": {"num_local_experts": 4}, "qwen2": {}, "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8},
    "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "stablelm": {}, "starcoder2": {},
    "cohere": {}, "granite": {}, "nemotron": {}, "glm4": {"head_dim": 8}, "persimmon": {},
    "smollm3": {}, "xglm": {"ffn_dim": 64, "d_model": 32, "num_layers": 3, "attention_heads": 4},
    "biogpt": {}, "mamba": {"state_size": 4}, "falcon_mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 32}, "xlstm": {}, "recurrent_gemma": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "lfm2": {},
}  # fmt: skip


@functools.cache
def random_model(family: str) -> LanguageModel:
    """A small instance of the family with weights large enough to make its blocks do something."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.data.normal_(0, 0.15)
    return as_language_model(model, name=family)
