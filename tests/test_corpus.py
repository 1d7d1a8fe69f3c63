"""Text to documents to windows: labels that point back to the text, splits that do not leak."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomstats_lm import read_corpus, windows
from tests.text_samples import STORIES, character_tokenizer


def test_files_folders_and_json_lines_become_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("First text.", encoding="utf-8")
    lines = [{"text": "Second."}, {"text": "Third."}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    whole = read_corpus(tmp_path)
    assert whole["text"].tolist() == ["First text.", "Second.", "Third."]
    paths = read_corpus([tmp_path / "b.jsonl", str(tmp_path / "a.txt")])
    assert sorted(paths["text"]) == sorted(whole["text"])
    assert read_corpus(lines)["text"].tolist() == ["Second.", "Third."]
    assert whole.attrs["text_checksum"] != paths.attrs["text_checksum"]  # order is part of it


def test_separator_drops_its_match_and_wikitext_keeps_titles(tmp_path: Path) -> None:
    assert read_corpus(["one\n--\ntwo\n--\n"], separator=r"(?m)^--$")["text"].tolist() == [
        "one",
        "two",
    ]
    wiki = tmp_path / "wiki.raw"
    wiki.write_bytes(
        b" \r\n = Title = \r\n Text . \r\n = = Section = = \r\n = Other = \r\n More\r\n"
    )
    titles = [
        text.split("\n")[0].strip() for text in read_corpus(wiki, separator="wikitext")["text"]
    ]
    assert titles == ["= Title =", "= Other ="]


def test_one_document_warns() -> None:
    with pytest.warns(UserWarning, match="one document"):
        read_corpus(["alone"])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda d: d / "nowhere.txt", FileNotFoundError, "nowhere.txt"),
        (lambda d: ["nowhere.jsonl"], FileNotFoundError, "nowhere.jsonl"),
        (lambda d: d, FileNotFoundError, "holds no"),
        (lambda d: _file(d, b"  \n "), ValueError, "is empty"),
        (lambda d: _file(d, b"caf\xe9 au lait"), ValueError, r"byte 3.*encoding="),
        (lambda d: _file(d, b'{"text": "a"}\n{"txt": 1}', "x.jsonl"), ValueError, "line 2"),
        (lambda d: _file(d, b"{broken", "x.jsonl"), ValueError, "line 1 is no JSON"),
        (lambda d: 7, TypeError, "source=7"),
        (lambda d: [{"body": "x"}], ValueError, "item 0"),
    ],
)
def test_bad_input_names_what_is_wrong(tmp_path: Path, make, error, match) -> None:
    with pytest.raises(error, match=match):
        read_corpus(make(tmp_path))


def test_bad_separator_is_named() -> None:
    with pytest.raises(ValueError, match=r"separator='\('"):
        read_corpus(["a", "b"], separator="(")


def _file(folder: Path, content: bytes, name: str = "x.txt") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(2, 20),
    share=st.floats(0.1, 0.9),
    seed=st.integers(0, 5),
    bos=st.booleans(),
    sizes=st.lists(st.integers(30, 90), min_size=4, max_size=8),
)
def test_windows_never_cross_documents_and_point_back(length, share, seed, bos, sizes) -> None:
    texts = [(chr(97 + i) * 7 + " ") * n for i, n in enumerate(sizes)]
    corpus = read_corpus(texts)
    cut = windows(
        corpus, character_tokenizer(bos=bos), length=length, evaluation_share=share, seed=seed
    )
    shape = (-1, length)
    document = cut.document.values.reshape(shape)
    assert (document == document[:, :1]).all()
    assert (cut.position.values.reshape(shape) == np.arange(length)).all()
    # a document is on one side only, and both sides have one
    sides = {d: set(cut.split.values[cut.document.values == d]) for d in set(document.ravel())}
    assert all(len(s) == 1 for s in sides.values())
    assert set().union(*sides.values()) == {0, 1}
    assert (np.diff(cut.split.values) >= 0).all()
    own = cut.isel(token=~cut.is_special.values)
    for i in range(0, own.sizes["token"], 37):
        token = own.isel(token=i)
        text = corpus["text"][int(token.document)]
        assert ord(text[int(token.char_start) : int(token.char_end)]) == int(token.token_id)
    assert bool(cut.is_special.values.reshape(shape)[:, 0].all()) is bos


def test_windows_repeat_by_seed_and_spread_over_documents() -> None:
    corpus, tokenizer = read_corpus(STORIES), character_tokenizer()
    first = windows(corpus, tokenizer, length=16, n_windows=(8, 4), seed=1)
    again = windows(corpus, tokenizer, length=16, n_windows=(8, 4), seed=1)
    other = windows(corpus, tokenizer, length=16, n_windows=(8, 4), seed=2)
    assert first.identical(again)
    assert not first.token_id.equals(other.token_id)
    counts = np.unique(first.document.values.reshape(-1, 16)[:, 0], return_counts=True)[1]
    assert counts.max() == 1  # twelve windows from twelve documents


def test_too_little_text_says_what_there_is() -> None:
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="too few documents.*longest document: 5 tokens"):
        windows(read_corpus(["tiny.", "small"]), tokenizer, length=16)
    with pytest.raises(ValueError, match="500 reference windows.*the corpus gives"):
        windows(read_corpus(STORIES), tokenizer, length=16, n_windows=(500, 4))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="at least 2 documents"):
        windows(read_corpus(["x" * 100]), tokenizer, length=16)
    with pytest.raises(ValueError, match="length=1"):
        windows(read_corpus(STORIES), tokenizer, length=1)


def test_groups_in_a_separator_are_no_documents() -> None:
    text = ["one\n***\ntwo\n---\nthree"]
    assert read_corpus(text, separator=r"(\*\*\*|---)")["text"].tolist() == ["one", "two", "three"]
    with pytest.raises(ValueError, match="separator=''"):
        read_corpus(["a", "b"], separator="")


def test_byte_order_marks_line_ends_and_unicode_separators(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    inside = "one\u2028line\u0085still"
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in (inside, "two")]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_corpus(path)["text"].tolist() == [inside, "two"]
    assert read_corpus([_file(tmp_path, b"a\rb"), path])["text"][0] == "a\nb"


def test_copies_warn_and_a_single_mapping_is_refused() -> None:
    with pytest.warns(UserWarning, match="1 of 3 documents are copies"):
        read_corpus(["same", "same", "other"])
    with pytest.raises(TypeError, match="a single mapping"):
        read_corpus({"text": "a"})
    with pytest.raises(ValueError, match="text 1 holds half a surrogate pair"):
        read_corpus(["fine", "\ud83d"])
