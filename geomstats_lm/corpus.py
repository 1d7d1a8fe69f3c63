"""Which text does a model read, and how is it cut into documents and windows of tokens?

Documents are what is split into reference and evaluation and what is resampled:
``text -> documents -> windows of equal length that never cross a document``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

SEPARATORS = {"wikitext": r"(?m)^(?= = [^=\n]+ = *$)"}
JSON_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".txt", *JSON_LINES, ".raw", ".tokens", ".md")
REFERENCE, EVALUATION = 0, 1


def read_corpus(
    source: str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]],
    *,
    separator: str | None = None,
    encoding: str = "utf-8",
) -> pd.DataFrame:
    """Read text into documents.

    Parameters
    ----------
    source : path, sequence of paths, sequence of str, or iterable of mappings
        A text file, a JSON-lines file (``.jsonl``) with a ``text`` field, or a folder of such
        files; several of them; texts themselves, one a document; or an iterable of mappings with
        a ``text`` field, as the ``datasets`` library gives.
    separator : str, optional
        Regular expression at which every text is cut into documents (the match itself is
        dropped; a lookahead keeps it), or ``"wikitext"`` for that corpus's `` = Title = `` lines.
    encoding : str
        Encoding of the files.

    Returns
    -------
    pandas.DataFrame
        One row a document (index ``document``), columns ``source`` and ``text``; ``attrs`` hold
        the SHA-256 ``text_checksum`` of all of it.

    Raises
    ------
    FileNotFoundError
        If a path does not exist, or a folder holds no text.
    ValueError
        If a file is empty, its bytes are not in ``encoding``, a JSON line has no text, or the
        separator is no regular expression.

    Warns
    -----
    UserWarning
        If there is one document only: it can be neither split nor resampled.

    Examples
    --------
    >>> corpus = read_corpus(["One story.", "Another story."])
    >>> corpus.shape
    (2, 2)
    """
    if isinstance(source, Mapping):
        raise TypeError(f"source={source!r:.80}: a single mapping; give a list of them")
    pattern = _separator_pattern(separator)
    rows: list[tuple[str, str]] = []
    for name, text in _texts(source, encoding):
        pieces = _cut(pattern, text) if pattern else [text]
        kept = [p.strip("\n") for p in pieces if p.strip()]
        if not kept:
            raise ValueError(f"source: {name} is empty")
        for piece in kept:
            if any("\ud800" <= character <= "\udfff" for character in piece):
                raise ValueError(f"source: {name} holds half a surrogate pair, which is no text")
        rows.extend((name, piece) for piece in kept)
    if not rows:
        raise ValueError(f"source={source!r} holds no text")
    if len(rows) == 1:
        warnings.warn(
            "the corpus is one document, so nothing can be split or resampled by document; pass "
            "separator= to cut it (a regular expression, or 'wikitext')",
            stacklevel=2,
        )
    copies = len(rows) - len({text for _, text in rows})
    if copies:
        warnings.warn(
            f"{copies} of {len(rows)} documents are copies of others; a copy may be reference for "
            "its original, which makes errors too small",
            stacklevel=2,
        )
    corpus = pd.DataFrame(rows, columns=["source", "text"]).rename_axis("document")
    digest = hashlib.sha256()
    for text in corpus["text"]:
        digest.update(text.encode("utf-8") + b"\0")
    corpus.attrs["text_checksum"] = digest.hexdigest()
    return corpus


def windows(
    corpus: pd.DataFrame,
    tokenizer: Any,
    *,
    length: int = 128,
    n_windows: int | tuple[int, int] | None = None,
    evaluation_share: float = 1 / 3,
    seed: int = 0,
) -> xr.Dataset:
    """Cut documents into labelled token windows, split by document into reference and evaluation.

    Parameters
    ----------
    corpus : pandas.DataFrame
        Documents, from :func:`read_corpus`.
    tokenizer : transformers tokenizer
        Its tokens; a window starts with the BOS token where it adds one by itself.
    length : int
        Tokens per window, BOS included.  What is left over at the end of a document is dropped,
        and so is a document shorter than one window: windows are packed, never padded.
    n_windows : int or (int, int), optional
        How many windows at most, of both splits together or of (reference, evaluation); all by
        default.  They are spread over as many documents as possible.
    evaluation_share : float
        Share of the documents that goes to evaluation (0: none).
    seed : int
        Of the split of documents and of the choice of windows.

    Returns
    -------
    xarray.Dataset
        Coordinates on ``token``: ``document``, ``sequence``, ``position``, ``token_id``,
        ``char_start`` and ``char_end`` (characters of the document; -1 where the tokenizer does
        not tell), ``split`` (0 reference, 1 evaluation), ``is_special``.  Reference windows come
        first.

    Raises
    ------
    ValueError
        If there is too little text for what is asked.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_path
    >>> from transformers import AutoTokenizer
    >>> tokenizer = AutoTokenizer.from_pretrained(example_path("gpt2"))
    >>> cut = windows(read_corpus(["A story. " * 60, "Another. " * 60]), tokenizer, length=16)
    >>> sorted(set(cut.split.values.tolist()))
    [0, 1]
    """
    if not isinstance(length, (int, np.integer)):
        raise TypeError(f"length={length!r}: a window's length is a whole number")
    if tokenizer is None:
        raise TypeError("tokenizer: None; load the model with its tokenizer")
    if seed < 0:
        raise ValueError(f"seed={seed}: accepted are 0 and above")
    if length < 2:
        raise ValueError(f"length={length}: a window needs at least 2 tokens")
    if not 0 <= evaluation_share < 1:
        raise ValueError(f"evaluation_share={evaluation_share}: accepted is 0 <= share < 1")
    wanted = _wanted(n_windows, evaluation_share)
    prefix = _prefix(tokenizer)
    body = length - len(prefix)
    if body < 1:
        raise ValueError(f"length={length} leaves no room after the {len(prefix)} added tokens")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(corpus))
    n_evaluation = round(len(corpus) * evaluation_share)
    if evaluation_share > 0:
        n_evaluation = min(max(n_evaluation, 1), len(corpus) - 1)
        if n_evaluation < 1:
            raise ValueError(
                "corpus: splitting into reference and evaluation needs at least 2 documents, "
                f"given {len(corpus)}; cut the text with separator= or pass evaluation_share=0"
            )
    groups = {REFERENCE: order[n_evaluation:], EVALUATION: order[:n_evaluation]}

    parts, dropped, longest = [], 0, 0
    sequence = 0
    for split, documents in groups.items():
        found: list[tuple[int, dict[str, np.ndarray]]] = []
        limit = wanted[split]
        for document in documents:
            tokens = _tokenize(tokenizer, corpus["text"].iloc[document])
            longest = max(longest, len(tokens["token_id"]))
            if len(tokens["token_id"]) < body:
                dropped += 1
                continue
            found.append((int(document), tokens))
            if limit is not None and len(found) >= limit:
                break  # one window from each document is as spread out as it gets
        chosen = _spread(found, body, limit, rng)
        if limit is not None and len(chosen) < limit:
            raise ValueError(
                f"n_windows: {limit} {('reference', 'evaluation')[split]} windows of "
                f"{length} tokens asked for, the corpus gives {len(chosen)} (documents: "
                f"{len(found)} long enough, {dropped} shorter than one window)"
            )
        by_document = dict(found)
        for document, start in sorted(chosen):
            tokens = by_document[document]
            parts.append(_window(tokens, prefix, start, body, document, sequence, split, tokenizer))
            sequence += 1
    present = {int(p["split"][0]) for p in parts}
    if not parts or (evaluation_share > 0 and present != {REFERENCE, EVALUATION}):
        raise ValueError(
            f"corpus: too few documents hold a window of length={length} tokens (longest document: "
            f"{longest} tokens; {dropped} of {len(corpus)} documents are too short)"
        )
    if dropped > len(corpus) / 2:
        warnings.warn(
            f"{dropped} documents are shorter than one window of {length} tokens and were dropped; "
            "a smaller length= keeps more",
            stacklevel=2,
        )
    columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return xr.Dataset(
        coords={
            "token": np.arange(len(columns["token_id"])),
            **{name: ("token", values) for name, values in columns.items()},
        },
        attrs={
            "window_length": length,
            "n_windows": len(parts),
            "n_documents": len(set(columns["document"].tolist())),
            "n_documents_too_short": dropped,
            "tokenizer": str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__)),
            "text_checksum": corpus.attrs.get("text_checksum", ""),
            "split_seed": seed,
        },
    )


def _cut(pattern: re.Pattern[str], text: str) -> list[str]:
    """The pieces between matches; unlike ``re.split`` groups in the pattern add none."""
    edges = [(0, 0), *(m.span() for m in pattern.finditer(text)), (len(text), len(text))]
    return [text[a[1] : b[0]] for a, b in itertools.pairwise(edges)]


def _separator_pattern(separator: str | None) -> re.Pattern[str] | None:
    if separator is None:
        return None
    if separator == "":
        raise ValueError("separator='' would make every character a document")
    try:
        return re.compile(SEPARATORS.get(separator, separator))
    except re.error as error:
        raise ValueError(f"separator={separator!r} is no regular expression: {error}") from None


def _texts(source: Any, encoding: str) -> Iterable[tuple[str, str]]:
    """(name, text) pairs of whatever a user calls a corpus."""
    if isinstance(source, (str, Path)):
        yield from _read_path(Path(source), encoding)
        return
    if not isinstance(source, Iterable):
        raise TypeError(
            f"source={source!r}: accepted are a path, paths, texts, or mappings with a 'text' field"
        )
    items = source if isinstance(source, Sequence) else list(source)
    if any(isinstance(item, Path) for item in items) or (
        items and all(isinstance(item, str) and _looks_like_path(item) for item in items)
    ):
        for item in items:
            yield from _read_path(Path(item), encoding)
        return
    for number, item in enumerate(items):
        text = item.get("text") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise ValueError(f"source: item {number} is {item!r:.80}, not a text or a 'text' field")
        yield f"text {number}", text


def _looks_like_path(item: str) -> bool:
    return os.path.exists(item) or (
        len(item) < 1000 and Path(item).suffix in SUFFIXES and not re.search(r"\s", item)
    )


def _read_path(path: Path, encoding: str) -> Iterable[tuple[str, str]]:
    if not os.path.exists(path):  # False too where the name is no possible path
        raise FileNotFoundError(
            f"source: there is no file or folder {str(path)[:200]} (texts themselves go in a list)"
        )
    if path.is_dir():
        files = sorted(
            f
            for f in path.rglob("*")
            if f.is_file() and f.suffix in SUFFIXES and not f.name.startswith(".")
        )
        if not files:
            raise FileNotFoundError(f"source: folder {path} holds no {', '.join(SUFFIXES)} file")
    else:
        files = [path]
    for file in files:
        try:
            # universal newlines, as open() in text mode: regular expressions expect "\n"
            text = file.read_bytes().decode(encoding).removeprefix("\ufeff")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"source: {file} is not {encoding}: byte {error.start} "
                f"({error.object[error.start : error.start + 1]!r}) cannot be decoded; "
                "pass encoding="
            ) from None
        if not text.strip():
            raise ValueError(f"source: {file} is empty")
        if file.suffix.lower() not in JSON_LINES:
            yield str(file), text
            continue
        # not splitlines(): JSON strings may hold other separators of lines
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"source: {file}, line {number} is no JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f"source: {file}, line {number} has no 'text' field")
            if record["text"].strip():
                yield f"{file}:{number}", record["text"]


def _wanted(
    n_windows: int | tuple[int, int] | None, evaluation_share: float
) -> dict[int, int | None]:
    if n_windows is None:
        return {REFERENCE: None, EVALUATION: None}
    if isinstance(n_windows, (int, np.integer)):
        evaluation = round(n_windows * evaluation_share)
        pair = (int(n_windows) - evaluation, evaluation)
    else:
        pair = tuple(int(n) for n in n_windows)  # type: ignore[assignment]
        if len(pair) != 2:
            raise ValueError(f"n_windows={n_windows}: accepted are a number or a pair")
    if pair[0] < 1 or (evaluation_share > 0 and pair[1] < 1):
        raise ValueError(f"n_windows={n_windows}: each split needs at least one window")
    return {REFERENCE: pair[0], EVALUATION: pair[1] if evaluation_share > 0 else None}


def _prefix(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before a text by itself (BOS where it has one)."""
    with_special = list(tokenizer("a").input_ids)
    plain = list(tokenizer("a", add_special_tokens=False).input_ids)
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


def _tokenize(tokenizer: Any, text: str) -> dict[str, np.ndarray]:
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    if fast:
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int32).reshape(-1, 2)
    else:
        offsets = np.full((len(ids), 2), -1, dtype=np.int32)
    return {"token_id": ids, "char_start": offsets[:, 0], "char_end": offsets[:, 1]}


def _spread(
    found: list[tuple[int, dict[str, np.ndarray]]],
    body: int,
    wanted: int | None,
    rng: np.random.Generator,
) -> list[tuple[int, int]]:
    """(document, first token) of the chosen windows: one from every document, then a second, …"""
    rounds = [
        (turn, place, document, int(start) * body)
        for place, (document, tokens) in enumerate(found)
        for turn, start in enumerate(rng.permutation(len(tokens["token_id"]) // body))
    ]
    return [(document, start) for _, _, document, start in sorted(rounds)[:wanted]]


def _window(
    tokens: dict[str, np.ndarray],
    prefix: list[int],
    start: int,
    body: int,
    document: int,
    sequence: int,
    split: int,
    tokenizer: Any,
) -> dict[str, np.ndarray]:
    inside = slice(start, start + body)
    ids = np.concatenate([np.asarray(prefix, dtype=np.int32), tokens["token_id"][inside]])
    first = tokens["char_start"][start]
    added = np.full(len(prefix), first, dtype=np.int32)
    n = len(ids)
    return {
        "document": np.full(n, document, dtype=np.int32),
        "sequence": np.full(n, sequence, dtype=np.int32),
        "position": np.arange(n, dtype=np.int32),
        "token_id": ids,
        "char_start": np.concatenate([added, tokens["char_start"][inside]]),
        "char_end": np.concatenate([added, tokens["char_end"][inside]]),
        "split": np.full(n, split, dtype=np.int8),
        "is_special": np.isin(ids, list(tokenizer.all_special_ids)) | (np.arange(n) < len(prefix)),
    }
