"""What does patching cost, in passes of the model, and what does comparing outputs cost?

    sweep = seconds of all layers patched once / (L x seconds of a full pass to the final states)

Run as `OMP_NUM_THREADS=1 python tests/benchmarks/bench_perturb.py`. Everything is timed in turns in
one process on one thread; a line shows the median ratio. `--memory` runs children that report
their peak memory.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import xarray as xr

from geomstats_lm.blocks import (
    LanguageModel,
    appends_exactly,
    apply_head,
    capture_final,
    resume_final,
)
from geomstats_lm.divergence import OUTPUT_MEASURES, clean_output, compare_outputs
from geomstats_lm.models import as_language_model
from geomstats_lm.patching import patch_all, patch_single
from geomstats_lm.perturb import perturb

LENGTH, REPEATS = 128, 5


def gpt2_like(*, layers: int, dim: int, vocabulary: int) -> LanguageModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=dim, n_layer=layers, n_head=dim // 64, vocab_size=vocabulary, n_positions=LENGTH
    )
    return as_language_model(GPT2LMHeadModel(config), name="bench")


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(repeats: int = REPEATS, **functions: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each, run one after the other in every repeat."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Median over repeats of the ratio within a repeat, which load on the machine moves less."""
    return median(a / b for a, b in zip(times[above], times[below]))


def passes(lm: LanguageModel, windows: int) -> None:
    """Blocks only: the head is timed apart."""
    ids = torch.randint(0, lm.vocabulary, (windows, LENGTH))
    states, _ = capture_final(lm, ids)
    n_tokens, depth = ids.numel(), lm.n_layers
    rng = np.random.default_rng(0)
    off = 0.1 * rng.standard_normal((n_tokens, lm.dim))
    mask = np.arange(n_tokens) % LENGTH > 0
    ones = [off]
    all_once = lambda layer, v: list(patch_all(lm, ids, layer, states[layer], v, mask))  # noqa: E731
    times = in_turns(
        full=lambda: capture_final(lm, ids),
        sweep=lambda: [resume_final(lm, ids, v, states[v]) for v in range(1, depth + 1)],
        patched=lambda: [all_once(v, ones) for v in range(1, depth + 1)],
        controlled=lambda: [all_once(v, [off, off]) for v in range(1, depth + 1)],
    )
    print(f"  all layers once / {depth} passes       {ratio(times, 'sweep', 'full') / depth:.2f}")
    print(f"  the same with patching           {ratio(times, 'patched', 'full') / depth:.2f}")
    print(f"  the same with one control        {ratio(times, 'controlled', 'full') / depth:.2f}")
    assert appends_exactly(lm, ids, states)
    layer = 1
    one = {"appends": True, "batch_size": 16}
    batched = {"appends": False, "batch_size": 16}
    first, first_mask = ids[:1], mask[:LENGTH]
    few = np.zeros_like(first_mask)
    few[1::16] = True
    times = in_turns(
        remaining=lambda: resume_final(lm, ids, layer, states[layer]),
        single=lambda: list(patch_single(lm, ids, layer, states[layer], ones, mask, **one)),
        window=lambda: resume_final(lm, first, layer, states[layer][:1]),
        eighth=lambda: list(patch_single(
            lm, first, layer, states[layer][:1], [off[:LENGTH]], few, **batched)),
    )  # fmt: skip
    print(f"  every position singly / a pass   {ratio(times, 'single', 'remaining'):.2f}")
    naive = (LENGTH - 1) * median(times["window"]) * windows / median(times["single"])
    rows = (LENGTH - 1) / few.sum() * median(times["eighth"]) * windows / median(times["single"])
    print(f"  one pass per position / that     {naive:.0f} (in batches of 16 cut off: {rows:.0f})")


def divergence(lm: LanguageModel, rows: int) -> None:
    final = torch.randn(rows, lm.dim)
    target = torch.randint(0, lm.vocabulary, (rows,))
    logits = apply_head(lm, final)
    patched = apply_head(lm, final + 0.1 * torch.randn(rows, lm.dim))
    clean = clean_output(logits, target)
    times = in_turns(
        head=lambda: apply_head(lm, final),
        kl=lambda: compare_outputs(clean, patched, ("kl",)),
        usual=lambda: compare_outputs(clean, patched),
        every=lambda: compare_outputs(clean, patched, tuple(OUTPUT_MEASURES)),
        clean=lambda: clean_output(logits, target),
    )
    for name in ("kl", "usual", "every", "clean"):
        print(f"  {name + ' / head':<32} {ratio(times, name, 'head'):.2f}")


def synthetic_parts(lm: LanguageModel, windows: int) -> xr.Dataset:
    """A decomposition of random residuals, of evaluation windows only."""
    rng = np.random.default_rng(0)
    n = windows * LENGTH
    shape = (1, 1, lm.n_layers, n, lm.dim)
    residual = 0.05 * rng.standard_normal(shape, dtype=np.float32)
    layers = np.arange(1, lm.n_layers + 1)
    return xr.Dataset(
        {"residual": (("model", "function_class", "layer", "token", "dim"), residual)},
        {
            "model": [lm.key], "function_class": ["affine"], "layer": layers,
            "position": ("token", np.arange(n) % LENGTH), "document": ("token", np.arange(n) // n),
            "token_id": ("token", rng.integers(0, lm.vocabulary, n)),
            "is_special": ("token", np.zeros(n, dtype=bool)),
        },
        {"window_length": LENGTH},
    )  # fmt: skip


def child(windows: int, vocabulary: int) -> None:
    lm = gpt2_like(layers=2, dim=64, vocabulary=vocabulary)
    parts = synthetic_parts(lm, windows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    perturb(lm, parts, positions=["all"], batch_size=8, progress=False)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before:.0f}")


def memory() -> None:
    print("peak memory above the model and its residuals, MB")
    for windows, vocabulary in ((8, 4096), (32, 4096), (8, 50257), (32, 50257), (8, 262144)):
        command = [sys.executable, __file__, "--child", str(windows), str(vocabulary)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        print(f"  {windows:3d} windows, {vocabulary:6d} words   {found}")


def main() -> None:
    torch.set_num_threads(1)
    if "--child" in sys.argv:
        child(int(sys.argv[-2]), int(sys.argv[-1]))
        return
    for layers, dim, windows in ((6, 192, 4), (8, 384, 2)):
        print(f"GPT-2-like, {layers} layers of {dim}, {windows} windows of {LENGTH}")
        passes(gpt2_like(layers=layers, dim=dim, vocabulary=4096), windows)
    print("vocabulary 50257, width 768")
    divergence(gpt2_like(layers=1, dim=768, vocabulary=50257), 64)
    if "--memory" in sys.argv:
        memory()


if __name__ == "__main__":
    main()
