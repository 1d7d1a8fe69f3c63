"""Random-weights instances of the model families that transformers ships."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from geomstats_lm.blocks import LanguageModel, UnsupportedModelError, appends_exactly, capture
from geomstats_lm.models import as_language_model

TABLE = Path(__file__).parent / "reference" / "families.csv"
COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SHORT = {"n_embd": 32, "n_layer": 3, "n_head": 4}
HEADS = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

# what mixes tokens -> family -> what it needs beside or instead of the common settings
MIXERS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "gpt2": SHORT, "gpt_neo": {"num_layers": 3, "num_heads": 4, "attention_types": [
            [["global", "local"], 1], [["global"], 1]]},
        "gpt_neox": {}, "gpt_neox_japanese": {}, "gptj": {**SHORT, "rotary_dim": 4},
        "gpt_bigcode": SHORT, "gpt-sw3": SHORT, "codegen": {**SHORT, "rotary_dim": 4},
        "openai-gpt": SHORT, "ctrl": {**SHORT, "dff": 64}, "opt": {"ffn_dim": 64}, "bloom": SHORT,
        "falcon": {}, "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3}, "llama": {},
        "mistral": {}, "ministral": HEADS, "qwen2": {}, "qwen3": HEADS, "gemma": HEADS,
        "gemma2": HEADS, "gemma3_text": HEADS, "gemma4_text": {
            **HEADS, "global_head_dim": 8, "vocab_size_per_layer_input": 99,
            "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "layer_types": ["full_attention"] * 3},
        "vaultgemma": HEADS, "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "olmo3": {},
        "stablelm": {}, "starcoder2": {}, "cohere": {}, "cohere2": {}, "granite": {},
        "nemotron": {}, "glm": HEADS, "glm4": HEADS, "persimmon": {}, "smollm3": {},
        "xglm": {"ffn_dim": 64, "d_model": 32, "num_layers": 3, "attention_heads": 4},
        "biogpt": {}, "arcee": {}, "apertus": {}, "bitnet": {}, "diffllama": {}, "doge": {},
        "exaone4": HEADS, "ernie4_5": HEADS, "helium": HEADS, "hunyuan_v1_dense": HEADS,
        "nanochat": {}, "seed_oss": HEADS, "minicpm3": LATENT,
    },
    "attention, mixture of experts": {
        "mixtral": {"num_local_experts": 4}, "qwen2_moe": {
            **EXPERTS, "shared_expert_intermediate_size": 32},
        "qwen3_moe": {**EXPERTS, **HEADS}, "olmoe": EXPERTS, "phimoe": EXPERTS,
        "granitemoe": EXPERTS, "deepseek_v2": {**EXPERTS, **LATENT},
        "deepseek_v3": {**EXPERTS, **LATENT}, "dots1": {**EXPERTS, **LATENT},
        "glm4_moe": {**EXPERTS, **HEADS, "n_group": 1, "topk_group": 1},
        "gpt_oss": {**EXPERTS, **HEADS}, "minimax_m2": {**EXPERTS, **HEADS, "rotary_dim": 8},
        "llama4_text": {**EXPERTS, **HEADS, "intermediate_size_mlp": 64},
        "jetmoe": {"kv_channels": 8, "num_local_experts": 4},
    },
    "state space": {
        "mamba": {"state_size": 4}, "falcon_mamba": {"state_size": 4},
        "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1,
                   "chunk_size": 8},
    },
    "linear recurrence": {"rwkv": {"attention_hidden_size": 32}, "xlstm": {}},
    "hybrid": {
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                  "mamba_d_state": 4},
        "bamba": {**MAMBA2, "attn_layer_indices": [1]},
        "falcon_h1": {**MAMBA2, **HEADS, "mamba_d_ssm": 64},
        "zamba2": {"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
                   "chunk_size": 8, "layers_block_type": ["mamba", "hybrid", "mamba"],
                   "num_mem_blocks": 1, "adapter_rank": 4},
        "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
                       "n_groups": 1, "chunk_size": 8, **HEADS,
                       "layers_block_type": ["attention", "mamba", "mlp"]},
        "granitemoehybrid": {**MAMBA2, **EXPERTS, "shared_intermediate_size": 32,
                             "layer_types": ["mamba", "attention", "mamba"]},
        "qwen3_next": {**EXPERTS, **HEADS, **LINEAR, "shared_expert_intermediate_size": 32},
        "olmo_hybrid": LINEAR, "qwen3_5_text": {**HEADS, **LINEAR},
        "minimax": {**EXPERTS, **HEADS, "block_size": 8, "layer_types": [
            "linear_attention", "full_attention", "linear_attention"]},
        "recurrent_gemma": {}, "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    },
}  # fmt: skip
FAMILIES = {family: config for group in MIXERS.values() for family, config in group.items()}
MIXER = {family: mixer for mixer, group in MIXERS.items() for family in group}
# families that are refused, and the words that say why
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3n_text": (
        {**HEADS, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
         "altup_num_inputs": 2, "num_kv_shared_layers": 0, "laurel_rank": 4,
         "layer_types": ["full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 3},
        "keeps several streams beside one another, not one state",
    ),
    "xlnet": (
        {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
        "puts positions before the batch",
    ),
    "xlm": (
        {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "causal": True},
        "masks the state between its blocks",
    ),
    "hrm_text": ({}, "runs two stacks of blocks in turn"),
}  # fmt: skip


@functools.cache
def random_model(family: str) -> LanguageModel:
    """A small instance of the family with weights large enough to make its blocks do something."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = FAMILIES[family] if family in FAMILIES else REFUSED[family][0]
    config = CONFIG_MAPPING[family](**{**COMMON, **own})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.data.normal_(0, 0.15)
    return as_language_model(model, name=family)


def contract_row(family: str) -> dict[str, str]:
    """What the package can do with a family, found out on a random instance of it."""
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    try:
        lm = random_model(family)
    except UnsupportedModelError:
        return {
            "family": family, "mixer": "", "extract": "no", "perturb": "no",
            "single_position": "no", "reason": REFUSED[family][1],
        }  # fmt: skip
    appends = appends_exactly(lm, ids, capture(lm, ids)[0])
    return {
        "family": family, "mixer": MIXER[family], "extract": "yes",
        "perturb": "yes" if lm.causal and lm.vocabulary else "no",
        "single_position": "appended" if appends else "batched", "reason": "",
    }  # fmt: skip


def contract_table() -> pd.DataFrame:
    """One row per family, in the order of the mixers."""
    return pd.DataFrame([contract_row(family) for family in (*FAMILIES, *REFUSED)])


def contract_markdown() -> str:
    """The stored table by mixer, as short as a README wants it."""
    table = pd.read_csv(TABLE, keep_default_na=False)
    good = table[table["extract"] == "yes"]
    lines = ["| mixer | families | single positions |", "|---|---|---|"]
    for (mixer, how), part in good.groupby(["mixer", "single_position"], sort=False):
        lines.append(f"| {mixer} | {', '.join(part['family'])} | {how} |")
    lines.append("")
    for row in table[table["extract"] == "no"].itertuples():
        lines.append(f"- `{row.family}` is refused: it {row.reason}.")
    return "\n".join(lines)


if __name__ == "__main__":
    contract_table().to_csv(TABLE, index=False, lineterminator="\n")
    print(contract_markdown())
