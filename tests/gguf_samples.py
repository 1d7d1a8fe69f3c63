"""Small GGUF files of random weights, as other programs write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip
GPT2_NAMES = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.h": "blk",
    "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down", "lm_head": "output",
}  # fmt: skip


def alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def small_model(family: str, **config: int) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shape = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 258, "bos_token_id": 257,
        "eos_token_id": 257, "max_position_embeddings": 64, "head_dim": 8,
    }  # fmt: skip
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 258, "n_positions": 1024,
                 "bos_token_id": 257, "eos_token_id": 257}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape | config))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.15)
    return model.eval()


def write_gguf(path: Path, family: str, model: Any) -> None:
    """Write the model as the GGUF architecture ``family``, unquantized."""
    import gguf

    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(3)
    writer.add_context_length(1024 if family == "gpt2" else 64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(128 if family == "gpt2" else 64)
    writer.add_head_count(4)
    writer.add_file_type(0)
    if family == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(2)
        writer.add_key_length(8)
        writer.add_value_length(8)
        writer.add_layer_norm_rms_eps(float(model.config.rms_norm_eps))
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet(), "ab", "<|end|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    names = GPT2_NAMES if family == "gpt2" else LLAMA_NAMES
    for name, parameter in model.named_parameters():
        written = name
        for theirs, short in names.items():
            written = written.replace(theirs, short)
        values = parameter.detach().numpy()
        if family == "gpt2" and values.ndim == 2 and "blk" in written:
            values = values.T  # Conv1D keeps the transpose of what a linear layer does
        writer.add_tensor(written, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
