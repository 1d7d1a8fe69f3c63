"""What would a study compute, and what would it cost?

Sizes follow from shapes; times from a short trial of each step on this machine,
``time = trial time x work / trial work``.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from geomstats_lm.blocks import LanguageModel, appends_exactly, capture
from geomstats_lm.cube import has_leaf
from geomstats_lm.declaration import StudyConfig, key_of
from geomstats_lm.decompose import decompose
from geomstats_lm.extract import activation_template
from geomstats_lm.study import cut_windows, load_section, read_text

COLUMNS = ("model", "step", "what", "disk_bytes", "memory_bytes", "seconds", "finished")
TRIAL_QUERIES = 256


def plan_study(config: StudyConfig) -> pd.DataFrame:
    """Plan a study without writing anything.

    Parameters
    ----------
    config : StudyConfig

    Returns
    -------
    pandas.DataFrame
        One row per model and step: ``disk_bytes`` it adds, peak ``memory_bytes`` beside the
        libraries' own, ``seconds`` estimated from a trial, and whether it is ``finished``.

    Raises
    ------
    ValueError, FileNotFoundError
        As :func:`run_study` would.
    """
    rows, corpus = [], read_text(config)
    for section in config.models:
        cut = cut_windows(config, section, corpus)
        lm = load_section(config, section)
        key = key_of(section)
        for step, what, disk, memory, seconds in _steps(config, lm, cut):
            done = config.store.exists() and has_leaf(config.store, key, step)
            rows.append((key, step, what, disk, memory, seconds, done))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def print_plan(plan: pd.DataFrame) -> None:
    """Print a plan and its totals."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title="What this study would compute (nothing is written)")
    for name in ("model", "step", "what", "disk", "memory", "time", ""):
        grid.add_column(name)
    for row in plan.to_dict("records"):
        done = "done" if row["finished"] else ""
        sizes = (_bytes(row["disk_bytes"]), _bytes(row["memory_bytes"]), _time(row["seconds"]))
        grid.add_row(row["model"], row["step"], row["what"], *sizes, done)
    todo = plan[~plan["finished"]]
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=140)
    console.print(grid)
    console.print(
        f"To do: {_bytes(todo['disk_bytes'].sum())} on disk, {_bytes(plan['memory_bytes'].max())} "
        f"of memory at the peak, about {_time(todo['seconds'].sum())} on this machine.",
        highlight=False,
    )


def _steps(
    config: StudyConfig, lm: LanguageModel, cut: xr.Dataset
) -> list[tuple[str, str, float, float, float]]:
    length = int(cut.attrs["window_length"])
    n, layers, dim = cut.sizes["token"], lm.n_layers, lm.dim
    n_evaluation = int((cut.split.values == 1).sum())
    n_reference = n - n_evaluation
    classes, patched = config.decompose.classes, config.perturbed
    variants = 1 + len(config.perturb.controls) * config.perturb.draws
    run = activation_template(lm, cut).hidden.chunksizes["token"][0]
    parameters = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    forward, appends = _trial_forward(lm, cut, length)
    width = 4 if config.extract.dtype == "float32" else 2
    batch_logits = config.extract.batch_size * length * lm.vocabulary * 4
    per_vector = n_evaluation * layers * dim * 4
    # half of the blocks are skipped on average; a divergence costs about as much as the head
    n_layers = len(config.perturb.layers or range(layers))
    window_tokens = n_evaluation * 0.6 * n_layers * len(patched)
    tokens = 0.0
    if "all" in config.perturb.positions:
        tokens += window_tokens * variants
    if "single" in config.perturb.positions:
        share = (config.perturb.n_single or length) * variants
        tokens += window_tokens * ((length + share) / length if appends else share * 0.6)
    scalars = n_evaluation * layers * (14 * len(classes) + 6) * 4
    output = n_evaluation * n_layers * len(patched) * len(config.perturb.positions)
    return [
        ("activations", f"{layers + 1} layers x {n} tokens x {dim}",
         (layers + 1) * n * dim * width, parameters + batch_logits + (layers + 1) * run * dim * 4,
         n * forward * 1.1),
        ("decomposition", f"{len(classes)} classes x {layers} layers x {n_evaluation} tokens, "
         f"{n_reference} reference tokens", per_vector * (2 + 2 * len(classes)),
         n_reference * dim * 12 + run * dim * 8 * (2 + 2 * len(classes)),
         _trial_decompose(config, n_reference, dim) * n_evaluation * layers),
        ("geometry", "norms, cosines, angles and their forced values", scalars,
         run * dim * 8 * (3 + len(classes)) * 2, per_vector * len(classes) * 4e-9),
        ("perturbation", f"{len(patched)} classes x {n_layers} layers, {variants} variants",
         output * 8 * (3 + variants),
         parameters + 4 * batch_logits + min(per_vector * len(patched), 1 << 30),
         tokens * forward),
    ]  # fmt: skip


def _trial_forward(lm: LanguageModel, cut: xr.Dataset, length: int) -> tuple[float, bool]:
    """Seconds per token of a forward pass, and whether single positions can be appended."""
    ids = torch.from_numpy(cut.token_id.values[: 8 * length].reshape(-1, length).astype(np.int64))
    trials = []
    for _ in range(3):  # the fastest: the first is slow by set-up, others by whoever else runs
        begun = time.perf_counter()
        states, _ = capture(lm, ids)
        trials.append(time.perf_counter() - begun)
    seconds = min(trials)
    appends = bool(lm.vocabulary and lm.causal) and appends_exactly(lm, ids, states)
    return seconds / ids.numel(), appends


def _trial_decompose(config: StudyConfig, n_reference: int, dim: int) -> float:
    """Seconds per evaluation token and layer, on one layer of noise of the real size."""
    rng = np.random.default_rng(0)
    n = n_reference + TRIAL_QUERIES
    token = np.arange(n)
    reference = token < n_reference
    coords: dict[str, Any] = {
        "model": ["trial"], "layer": [0, 1], "depth": ("layer", [0.0, 1.0]), "token": token,
    }  # fmt: skip
    labels = {
        "document": np.where(reference, token // 128, n + token), "sequence": token // 128,
        "position": np.full(n, 1), "token_id": token % 1000, "char_start": token,
        "char_end": token, "split": np.where(reference, 0, 1), "is_special": np.zeros(n, bool),
    }  # fmt: skip
    coords.update({name: ("token", values) for name, values in labels.items()})
    hidden = rng.standard_normal((1, 2, n, dim), dtype=np.float32)
    data = xr.Dataset(
        {"hidden": (("model", "layer", "token", "dim"), hidden)}, coords, {"window_length": 1}
    )
    options = config.decompose.model_dump()
    decompose(data, **options, keep=("residual",)).isel(token=slice(0, 8)).compute()  # compile
    begun = time.perf_counter()
    decompose(data, **options, keep=("residual",)).compute()
    return (time.perf_counter() - begun) / TRIAL_QUERIES


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
