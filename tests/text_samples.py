"""A tokenizer of single characters and a few short documents."""

from __future__ import annotations

import string

from transformers import PreTrainedTokenizerFast

STORIES = [
    f"Story {name}. " + " ".join(f"{name}{word} saw {i} birds." for i, word in enumerate(words))
    for name, words in zip(
        string.ascii_lowercase[:16], [["fox", "cat", "owl", "bee", "ant", "eel"]] * 16
    )
]
VOCABULARY = 128


def character_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Token id = code point; with ``bos`` it puts token 2 before every text by itself."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    vocabulary = {chr(i): i for i in range(3, VOCABULARY)} | {"<unk>": 0, "<pad>": 1, "<s>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
