"""Random-weights instances of the model families that transformers ships."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from geomstats_lm.blocks import LanguageModel, UnsupportedModelError
from geomstats_lm.describe import describe_model
from geomstats_lm.models import as_language_model

TABLE = Path(__file__).parent / "reference" / "families.csv"
README = Path(__file__).parent.parent / "README.md"
MARKS = ("<!-- families: written by tests/families.py -->", "<!-- end of families -->")
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
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
TEXT = {**COMMON, **HEADS}
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "image_size": 8, "patch_size": 4, "vision_output_dim": 16,
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
        "nanochat": {}, "seed_oss": HEADS, "minicpm3": LATENT, "apertus1p5_text": {}, "cwm": HEADS,
        "exaone": HEADS, "hyperclovax": HEADS, "internlm3": HEADS, "iquestcoder": HEADS,
        "jais2": HEADS, "ministral3": {}, "modernbert-decoder": {}, "granite_swa": {},
        "gemma4_unified_text": HEADS, "youtu": LATENT, "moshi": {**HEADS, "ffn_dim": 64},
        "inkling_text": {**EXPERTS, **HEADS},
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
        "jetmoe": {"kv_channels": 8, "num_local_experts": 4}, "afmoe": {**EXPERTS, **HEADS},
        "aria_text": {**HEADS, "moe_num_experts": 4, "moe_topk": 2}, "axk1": {**EXPERTS, **LATENT},
        "beam": {**EXPERTS, **HEADS}, "cohere2_moe": {**EXPERTS, **HEADS},
        "dbrx": {"d_model": 32, "n_layers": 3, "n_heads": 4,
                 "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
                 "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
        "deepseek_v32": {**EXPERTS, **LATENT, **INDEXED}, "ernie4_5_moe": {
            **EXPERTS, "moe_num_experts": 4, "moe_k": 2},
        "exaone_moe": {**EXPERTS, **HEADS}, "flex_olmo": EXPERTS, "flint": {**EXPERTS, **HEADS},
        "glm4_moe_lite": {**EXPERTS, **LATENT}, "glm_moe_dsa": {**EXPERTS, **LATENT, **INDEXED},
        "granitemoe_swa": EXPERTS, "granitemoeshared": EXPERTS,
        "hunyuan_v1_moe": {**HEADS, "num_experts": 4}, "hy_v3": {**EXPERTS, **HEADS},
        "kolibri1": {**EXPERTS, **HEADS}, "laguna": {**EXPERTS, **HEADS},
        "mellum": {**EXPERTS, **HEADS}, "minimax_m3_vl_text": {**EXPERTS, **HEADS},
        "sarvam_mla": {**EXPERTS, **LATENT}, "sarvam_moe": {**EXPERTS, **HEADS},
        "solar_open": {**EXPERTS, **HEADS},
    },
    "attention, text part of a model of several media": {
        "gemma3": {"text_config": TEXT, "vision_config": VISION},
        "gemma4": {"text_config": {**TEXT, "vocab_size_per_layer_input": 99, "global_head_dim": 8,
                                   "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
                                   "layer_types": ["full_attention"] * 3}},
        "llama4": {"text_config": {**TEXT, **EXPERTS, "intermediate_size_mlp": 64},
                   "vision_config": VISION},
        "mllama": {"text_config": {**TEXT, "cross_attention_layers": []},
                   "vision_config": VISION},
        "emu3": {"text_config": TEXT}, "git": {"vision_config": VISION}, "fuyu": {},
    },
    "attention, decoder of an encoder-decoder": {
        family: {"encoder_layers": 2, "decoder_layers": 3, "d_model": 32, "decoder_ffn_dim": 64,
                 "encoder_ffn_dim": 64, "decoder_attention_heads": 4, "encoder_attention_heads": 4}
        for family in ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian",
                       "mbart", "mvp", "pegasus", "plbart", "trocr", "whisper")
    },
    "attention, encoder with is_decoder": {
        family: {"is_decoder": True, "attention_type": "original_full", **own} for family, own in {
            "bert": {}, "bert-generation": {}, "big_bird": {}, "camembert": {},
            "data2vec-text": {}, "electra": {"embedding_size": 32}, "ernie": {},
            "megatron-bert": {}, "rembert": {
                "input_embedding_size": 32, "output_embedding_size": 32},
            "roberta": {}, "roberta-prelayernorm": {}, "roc_bert": {
                "pronunciation_vocab_size": 99, "shape_vocab_size": 99},
            "roformer": {}, "xlm-roberta": {}, "xlm-roberta-xl": {},
            "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
        }.items()
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
        "lfm2_moe": {**EXPERTS, "num_dense_layers": 1,
                     "layer_types": ["conv", "full_attention", "conv"]},
        "lfm3": HEADS, "lara_mini": {**EXPERTS, **HEADS},
        "bailing_hybrid": {**EXPERTS, **LATENT, **HEADS, "layer_group_size": 2,
                           "linear_head_dim": 8},
        "qwen3_5": {"text_config": {**TEXT, **LINEAR}, "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "intermediate_size": 16}},
        "qwen3_5_moe_text": {**EXPERTS, **HEADS, **LINEAR, "shared_expert_intermediate_size": 32},
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
    "dory": ({}, "runs its blocks several times"),
    "reformer": (
        {"is_decoder": True, "attn_layers": ["local", "lsh", "local"], "attention_head_size": 8,
         "feed_forward_size": 64, "axial_pos_embds": False, "local_attn_chunk_length": 4,
         "lsh_attn_chunk_length": 4, "num_buckets": 2},
        "fills windows up to its chunks and keeps two streams",
    ),
    "cpmant": ({"prompt_length": 4}, "puts a prompt of its own before the window"),
    "deepseek_v4": (EXPERTS, "keeps several streams beside one another, not one state"),
    "hy_v4": (EXPERTS, "keeps several streams beside one another, not one state"),
    "qwen4_exp_text": (
        {**EXPERTS, **HEADS}, "keeps several streams beside one another, not one state"
    ),
    "prophetnet": (
        {"num_hidden_layers": None, "num_decoder_layers": 3, "num_encoder_layers": 2,
         "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
         "decoder_ffn_dim": 64, "encoder_ffn_dim": 64},
        "keeps a stream for each token that it predicts ahead",
    ),
}  # fmt: skip


@functools.cache
def random_model(family: str) -> LanguageModel:
    """A small instance of the family with weights large enough to make its blocks do something."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = FAMILIES[family] if family in FAMILIES else REFUSED[family][0]
    # a config of several parts has the common settings in its text part
    settings = own if "text_config" in own else {**COMMON, **own}
    config = CONFIG_MAPPING[family](**{k: v for k, v in settings.items() if v is not None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and "conv" in name:  # kernels that some families start near 0
                parameter.data.normal_(0, 0.3)
            elif parameter.ndim > 1:
                parameter.data.normal_(0, 0.15)
    return as_language_model(model, name=family)


def contract_row(family: str) -> dict[str, str]:
    """What the package can do with a family, found out on a random instance of it."""
    try:
        lm = random_model(family)
    except UnsupportedModelError:
        return {
            "family": family, "mixer": "", "extract": "no", "perturb": "no",
            "single_position": "no", "split": "no", "self_only": "no",
            "reason": REFUSED[family][1],
        }  # fmt: skip
    page = describe_model(lm)
    can = {support.verb: support for support in page.verbs}
    parts = [name for name in ("mixer", "mlp") if page.facts[name] not in ("", "none")]
    return {
        "family": family,
        "mixer": MIXER[family],
        "extract": _word(can["extract"].supported),
        "perturb": _word(can["perturb_all"].supported),
        "single_position": "in one pass" if "one pass" in can["perturb_single"].how else "batched",
        "split": " + ".join(parts) if can["parts"].supported else "no",
        "self_only": _word(can["self_only"].supported),
        "reason": "",
    }


def _word(supported: bool | None) -> str:
    return "yes" if supported else "no"


def contract_table() -> pd.DataFrame:
    """One row per family, in the order of the mixers."""
    return pd.DataFrame([contract_row(family) for family in (*FAMILIES, *REFUSED)])


def contract_markdown() -> str:
    """The stored table, families that can do the same in one row."""
    table = pd.read_csv(TABLE, keep_default_na=False)
    columns = ["mixer", "extract", "perturb", "single_position", "split", "self_only"]
    lines = [
        "| mixer | families | extract | perturb | single positions | mixer/MLP split | self_only |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, rows in table[table["extract"] == "yes"].groupby(columns, sort=False):
        names = ", ".join(rows["family"])
        lines.append("| " + " | ".join([key[0], names, *key[1:]]) + " |")
    refused = table[table["extract"] == "no"]
    lines += ["", "Refused, with the reason:"]
    for reason, rows in refused.groupby("reason", sort=False):
        lines.append(f"- {', '.join(rows['family'])}: {reason}")
    lines.append("- encoder-decoders: what their decoder says depends on two texts")
    return "\n".join(lines)


def readme_with_table(text: str) -> str:
    """The README with the generated table between its two marks."""
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{contract_markdown()}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    contract_table().to_csv(TABLE, index=False, lineterminator="\n")
    README.write_text(readme_with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
