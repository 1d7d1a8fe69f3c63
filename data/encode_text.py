"""How does the text become the tokens that every example model shares?

    text -> UTF-8 bytes -> byte-level BPE with 4096 entries, `<|endoftext|>` among them

The tokenizer is trained on the training documents alone. It adds no token by itself; training and
evaluation put one `<|endoftext|>` before each document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fetch_text import ROOT, Document, evaluation_sample, training_and_heldout
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
TOKENIZER = ROOT / ".cache" / "tokenizer"
ENCODED = ROOT / ".cache" / "tokens.npz"

Tokens = list[np.ndarray]


def encoded_documents() -> tuple[Tokens, Tokens, list[Document], PreTrainedTokenizerFast]:
    """Return training tokens, held-out tokens (one array per document), the sample, the tokenizer.

    The held-out tokens are those of the evaluation sample. All are cached after the first call.
    """
    if not ENCODED.exists():
        training, heldout = training_and_heldout()
        tokenizer = train_tokenizer([d["text"] for d in training])
        tokenizer.save_pretrained(TOKENIZER)
        parts = {"training": training, "heldout": evaluation_sample(heldout)}
        arrays: dict[str, np.ndarray] = {}
        for name, part in parts.items():
            encoded = [encode(tokenizer, d["text"]) for d in part]
            arrays[name] = np.concatenate(encoded)
            arrays[name + "_lengths"] = np.array([len(tokens) for tokens in encoded])
        # Written last and renamed, so that an interrupted call is not taken for a finished one.
        partial = ENCODED.with_name("partial.npz")
        np.savez(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(ENCODED)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    _, heldout = training_and_heldout()
    with np.load(ENCODED) as stored:
        split = {
            name: np.split(stored[name], np.cumsum(stored[name + "_lengths"])[:-1])
            for name in ("training", "heldout")
        }
    return split["training"], split["heldout"], evaluation_sample(heldout), tokenizer


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on texts; the result is deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Return the token ids of one text, without any token added, (token,) int64."""
    return np.array(tokenizer.backend_tokenizer.encode(text).ids, dtype=np.int64)
