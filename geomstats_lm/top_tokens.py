"""At which tokens is the residual largest, at which the damage, and in which words?

residual_i = mean over layers 2..L of e_il,   damage_i = mean over those layers of KL_il
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.findings import ModelFindings, spans

AROUND = 14  # tokens of context on either side


def largest(model: ModelFindings, number: int = 5) -> pd.DataFrame:
    """The tokens with the largest residual and those with the largest damage.

    Parameters
    ----------
    model : ModelFindings
    number : int
        Of each.

    Returns
    -------
    pandas.DataFrame
        ``model``, ``of`` ("residual" or "damage"), ``rank``, ``value``, the token's labels, its
        ``index`` among the leaf's tokens; empty where neither was measured.
    """
    rows = []
    for kind, leaf, values in measured(model):
        order = np.argsort(np.where(np.isfinite(values), -values, np.inf), kind="stable")[:number]
        for rank, index in enumerate(order, start=1):
            if np.isfinite(values[index]):
                labels = {
                    name: leaf[name].values[index].item()
                    for name in ("document", "sequence", "position", "token_id", "char_start",
                                 "char_end")
                    if name in leaf.coords
                }  # fmt: skip
                rows.append(
                    {"model": model.key, "of": kind, "rank": rank, "value": values[index],
                     **labels, "index": int(index)}
                )  # fmt: skip
    return pd.DataFrame(rows)


def measured(model: ModelFindings) -> list[tuple[str, xr.Dataset, np.ndarray]]:
    """(kind, leaf, one value a token) of what was measured."""
    found = []
    for kind, name, variable in (
        ("residual", "geometry", "relative_error"),
        ("damage", "perturbation", "kl"),
    ):
        leaf = model.leaves.get(name)
        label = model.main_class
        if leaf is None or variable not in leaf or label not in leaf.function_class.values:
            continue
        values = leaf[variable].isel(model=0).sel(function_class=label)
        if "positions" in values.dims:
            modes = values.positions.values.tolist()
            # alone, so that what is shown is the token's own damage and not its context's
            values = values.sel(positions="single" if "single" in modes else modes[0])
        layers = list(spans(values.layer.values).values())[-1]
        found.append((kind, leaf, values.sel(layer=layers).mean("layer").values.astype(float)))
    return found


class TextUnavailable(Exception):
    """There is nothing to read the tokens' text from; the message says what was tried."""


def text_source(model: ModelFindings, corpus: pd.DataFrame | None, tokenizer: Any | None) -> Any:
    """A function (leaf, indices) -> texts of these tokens.

    Parameters
    ----------
    model : ModelFindings
    corpus : pandas.DataFrame, optional
        The documents, if the caller has them.
    tokenizer : tokenizer or path, optional
        In place of the one that the study names.

    Returns
    -------
    callable

    Raises
    ------
    TextUnavailable
        If neither the documents nor a tokenizer can be had.
    """
    attrs = model.attrs
    why = "no documents were given"
    if corpus is not None:
        checksum = attrs.get("text_checksum", "")
        if corpus.attrs.get("text_checksum", "") in ("", checksum) or not checksum:
            leaf = next(iter(model.leaves.values()))
            if "char_start" in leaf.coords and (leaf["char_start"].values >= 0).any():
                return lambda leaf, indices: _from_corpus(corpus, leaf, indices)
            why = "the tokens do not say where in their documents they stand"
        else:
            why = "the documents given are not those of the study"
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        tokenizer, reason = _load(tokenizer or attrs.get("tokenizer", ""))
        if tokenizer is None:
            raise TextUnavailable(f"{why}, and {reason}")
    return lambda leaf, indices: _decoded(tokenizer, leaf["token_id"].values[indices].tolist())


def _load(name: str | Path) -> tuple[Any, str]:
    """A tokenizer from this machine: a report asks no network for anything."""
    if not str(name):
        return None, "the study does not name its tokenizer"
    if str(name).endswith(".gguf") and Path(name).is_file():
        from geomstats_lm.models import load_tokenizer

        return load_tokenizer(name), ""
    try:
        from transformers import AutoTokenizer

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(str(name), local_files_only=True), ""
    except Exception as error:  # files of any origin fail in any way
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return None, f"the tokenizer {str(name)!r} is not on this machine ({first[:120]})"


def _from_corpus(corpus: pd.DataFrame, leaf: xr.Dataset, indices: np.ndarray) -> list[str]:
    starts, ends = leaf["char_start"].values[indices], leaf["char_end"].values[indices]
    documents = leaf["document"].values[indices]
    texts = []
    last: tuple[int, int] = (-1, 0)
    for document, start, end in zip(documents.tolist(), starts.tolist(), ends.tolist()):
        text = corpus["text"].iloc[document] if 0 <= document < len(corpus) else ""
        if start < 0:
            texts.append("")
            continue
        # spaces that no token covers belong in front of the next one
        begin = last[1] if last[0] == document and last[1] <= start else start
        texts.append(text[begin:end])
        last = (document, end)
    return texts


def _decoded(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds to what came before."""
    texts, before = [], ""
    for index in range(len(ids)):
        now = tokenizer.decode(ids[: index + 1])
        if now.endswith("\ufffd"):  # the first bytes of a character: the token that ends it has it
            texts.append("")
            continue
        texts.append(now[len(before) :] if now.startswith(before) else tokenizer.decode(ids[index]))
        before = now
    return texts


def in_context(leaf: xr.Dataset, index: int, around: int = AROUND) -> np.ndarray:
    """Indices of a token's neighbours in its own window, itself included."""
    sequences = leaf["sequence"].values
    near = np.arange(max(0, index - around), min(len(sequences), index + around + 1))
    return near[sequences[near] == sequences[index]]
