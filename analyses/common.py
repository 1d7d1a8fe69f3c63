"""What do the analyses share?  One study of the example models, options, and how results are kept.

Documents are split into reference and evaluation; ``extract -> decompose -> geometry -> perturb``
are done for whatever model the store lacks, so the first script that needs a model makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

import geomstats_lm as gl
from geomstats_lm.cube import open_node
from geomstats_lm.report import layer_groups
from geomstats_lm.statistics.results import markdown_table, rounded

ROOT = Path(__file__).resolve().parents[1]
CLASSES = (
    "identity", "mean", "token_mean", "local_mean", "linear", "affine", "affine[scope=global]",
    "self_only",
)  # fmt: skip
PATCHED = ("mean", "affine", "affine[scope=global]")
CONTROLS = ("exchanged", "gaussian", "isotropic")
K = 32  # nearest reference tokens of a local map
COMPONENTS = 16  # of the dominant subspaces


def options(question: str, *, models: Sequence[str] | None = None, **more: Any) -> Any:
    """Options of a script from the command line; in a notebook, the defaults.

    ``models`` are those taken by default: all that are there but checkpoints.  ``more`` adds
    options with their defaults.
    """
    there = gl.available_models()
    models = [n for n in there if "-step" not in n] if models is None else list(models)
    stem = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        prog=f"python analyses/{stem}.py", description=question,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--store", type=Path, default=ROOT / "results" / "zoo.zarr",
                        help="study shared by all scripts; what it lacks is made")  # fmt: skip
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME",
                        help="example models; <name>-untrained: with fresh weights")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results" / stem,
                        help="folder of tables and figures")  # fmt: skip
    parser.add_argument("--windows", type=int, nargs=2, default=(96, 40), metavar=("REF", "EVAL"),
                        help="windows of reference and evaluation documents")  # fmt: skip
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--n-boot", type=int, default=999, help="resamples of documents")
    for name, default in more.items():
        many = isinstance(default, tuple)
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=default, nargs="+" if many else None,
            type=type(default[0] if many else default),
        )  # fmt: skip
    given = parser.parse_args([] if "ipykernel" in sys.modules else None)
    unknown = [n for n in given.models if n.removesuffix("-untrained") not in there]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)} not here; there are {', '.join(there)}")
    default_store = given.store == parser.get_default("store")
    if not default_store and not given.store.absolute().parent.is_dir():
        parser.error(f"--store: there is no folder {given.store.parent} to hold {given.store.name}")
    if min(given.windows) < 1 or given.length < 2 or given.n_boot < 99:
        parser.error("--windows and --length: at least 1 and 2; --n-boot: at least 99")
    given.question = " ".join(question.split("\n\n")[0].split())
    given.command = shlex.join(["python", f"analyses/{stem}.py", *sys.argv[1:]])
    return given


def load(name: str) -> Any:
    """An example model, or its twin with fresh weights."""
    return gl.load_example(name.removesuffix("-untrained"), untrained=name.endswith("-untrained"))


def node(name: str, given: Any, *, perturbed: bool = False) -> xr.DataTree:
    """A model's node of the study, with what it lacks made first."""
    store, model = given.store, load(name)
    store.parent.mkdir(parents=True, exist_ok=True)
    how: dict[str, Any] = {"store": store, "progress": sys.stderr.isatty()}
    cut = gl.windows(
        gl.example_corpus(), model.tokenizer, length=given.length, n_windows=tuple(given.windows),
        evaluation_share=0.5,
    )  # fmt: skip
    gl.extract(model, cut, **how)
    gl.decompose(open_node(store, name), CLASSES, k=K, model=model, **how)
    space = gl.dominant_subspaces(
        open_node(store, name), COMPONENTS, parts=["tokenwise"], centred=True, model=model,
        reference_tokens=2048, **how,
    )  # fmt: skip
    gl.geometry(open_node(store, name), subspace=space, centred=True, **how)
    if perturbed:
        gl.perturb(
            model, open_node(store, name), function_class=PATCHED, controls=CONTROLS, n_single=4,
            measures=["kl"], **how,
        )  # fmt: skip
    return open_node(store, name)


def facts(nodes: dict[str, xr.DataTree]) -> list[str]:
    """What a reader of any table needs: k, N, tokens, documents, what was left out."""
    lines = []
    for name, one in nodes.items():
        data = one["geometry"].to_dataset()
        used, massive = data.usable.sum("token").values, data.n_massive.values
        documents = len(set(data.document.values.tolist()))
        lines.append(
            f"{name}: k = {K}, N = {int(data.n_reference.max())} reference tokens; "
            f"{used.min()} to {used.max()} evaluation tokens a layer in {documents} documents; "
            f"left out: {int((data.position == 0).sum())} first and "
            f"{int(data.is_special.sum())} special tokens, {massive.min()} to {massive.max()} "
            "massive ones a layer."
        )
    if lines:
        lines.append("Intervals of 95 % resample whole documents.")
    return lines


def keep(frame: pd.DataFrame, name: str, given: Any, notes: Sequence[str] = (), *,
         shown: pd.DataFrame | None = None) -> None:  # fmt: skip
    """Write a table as CSV (unrounded) and as Markdown (``shown`` if given), and print it."""
    given.out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(given.out / f"{name}.csv", index=False, float_format="%.8g")
    table = markdown_table(rounded(frame if shown is None else shown))
    page = [f"# {given.question}", f"    {given.command}", table, *(f"- {n}" for n in notes)]
    (given.out / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    sys.stdout.write(f"{os.path.relpath(given.out / name)}.md: {len(frame)} rows\n")


def keep_figure(drawn: Any, name: str, given: Any) -> None:
    """Write a figure, or that of its axes, as a small PNG."""
    given.out.mkdir(parents=True, exist_ok=True)
    getattr(drawn, "figure", drawn).savefig(given.out / f"{name}.png", dpi=110, bbox_inches="tight")


def groups(data: xr.Dataset) -> dict[str, list[int]]:
    """Layer groups of the tables under names that models of other depths share."""
    named = layer_groups(data.layer.values)
    return {name.partition("(")[2].rstrip(")"): layers for name, layers in named.items()}


def mixer(data: xr.Dataset) -> str:
    """What carries context in a model: attention alone, or a recurrence (state space, RWKV)."""
    attention = ("GPT2", "Llama", "GPTNeoX")
    return "attention" if data.attrs["architecture"].startswith(attention) else "recurrent"


def card(name: str) -> dict[str, Any]:
    """How an example model was trained and how well it predicts."""
    path = gl.example_path(name.removesuffix("-untrained")) / "card.json"
    return json.loads(path.read_text(encoding="utf-8"))
