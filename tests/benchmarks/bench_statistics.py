"""How much faster than a loop over scipy, how much dearer is BCa, does `by=` scale?

    ratio = median seconds of the loop / median seconds of the package, in turns in one process

Run as `python tests/benchmarks/bench_statistics.py`. Loops are timed on some of their resamples and
scaled to all, since each resample costs the same. Pin to one core for the single-core figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from geomstats_lm.statistics import rank_correlation
from geomstats_lm.statistics.permutation import exchange_test, shift_test
from geomstats_lm.statistics.ranks import resampled_spearman
from geomstats_lm.statistics.resampling import draw_counts

TOKENS, SEQUENCES, RESAMPLES = 20_000, 200, 2000


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(repeats: int, **functions: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, run one after the other in every repeat."""
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return {name: float(np.median(values)) for name, values in times.items()}


def data(ties: bool = False):
    rng = np.random.default_rng(0)
    sequence = np.repeat(np.arange(SEQUENCES), TOKENS // SEQUENCES)
    x = rng.normal(size=TOKENS)
    y = x + rng.normal(size=TOKENS)
    return (np.round(x, 2), np.round(y, 2), sequence) if ties else (x, y, sequence)


def spearman_bootstrap(repeats: int, ties: bool) -> float:
    x, y, sequence = data(ties)
    counts = draw_counts(SEQUENCES, RESAMPLES)
    rows = [np.flatnonzero(sequence == g) for g in range(SEQUENCES)]
    some = 10

    def loop():
        for b in range(some):
            drawn = np.concatenate([rows[g] for g in np.repeat(np.arange(SEQUENCES), counts[:, b])])
            stats.spearmanr(x[drawn], y[drawn])

    times = in_turns(repeats, ours=lambda: resampled_spearman(x, y, sequence, counts), loop=loop)
    return times["loop"] * RESAMPLES / some / times["ours"]


def permutations(repeats: int) -> dict[str, float]:
    x, y, sequence = data()
    rx, ry = stats.rankdata(x), stats.rankdata(y)
    rng = np.random.default_rng(0)
    blocks = [ry[sequence == g] for g in range(SEQUENCES)]
    some = 20

    def exchange_loop():
        for _ in range(some):
            order = rng.permutation(SEQUENCES)
            stats.spearmanr(rx, np.concatenate([blocks[g] for g in order]))

    def shift_loop():
        for _ in range(some):
            turned = [np.roll(block, rng.integers(block.size)) for block in blocks]
            stats.spearmanr(rx, np.concatenate(turned))

    number = {"n_permutations": RESAMPLES}
    times = in_turns(
        repeats,
        exchange=lambda: exchange_test(rx, ry, sequence, **number),
        exchange_loop=exchange_loop,
        shift=lambda: shift_test(rx, ry, sequence, **number),
        shift_loop=shift_loop,
    )
    scale = RESAMPLES / some
    return {
        "exchange": times["exchange_loop"] * scale / times["exchange"],
        "shift": times["shift_loop"] * scale / times["shift"],
    }


def bca_over_percentile(repeats: int) -> float:
    x, y, sequence = data()
    frame = pd.DataFrame({"kl": y, "residual_norm": x, "document": sequence})
    times = in_turns(
        repeats,
        percentile=lambda: rank_correlation(frame, n_boot=RESAMPLES),
        bca=lambda: rank_correlation(frame, n_boot=RESAMPLES, interval="bca"),
    )
    return times["bca"] / times["percentile"]


def scaling(repeats: int) -> dict[str, float]:
    """Seconds per cell for 10 and 100 cells, and the gain of two threads over one."""
    x, y, sequence = data()
    cell = pd.DataFrame({"kl": y, "residual_norm": x, "document": sequence})
    frames = {
        n: pd.concat([cell.assign(layer=layer) for layer in range(n)], ignore_index=True)
        for n in (10, 100)
    }

    def run(n: int, workers: int):
        return lambda: rank_correlation(frames[n], n_boot=500, workers=workers)

    times = in_turns(repeats, ten=run(10, 1), hundred=run(100, 1), hundred_in_two=run(100, 2))
    return {
        "cost per cell, 100 cells over 10": times["hundred"] / times["ten"] / 10,
        "two threads": times["hundred"] / times["hundred_in_two"],
    }


def main(repeats: int = 7) -> None:
    print(
        f"{TOKENS} tokens, {SEQUENCES} sequences, {RESAMPLES} resamples, {repeats} repeats in turns"
    )
    for ties in (False, True):
        name = "with ties" if ties else "without ties"
        ratio = spearman_bootstrap(repeats, ties)
        print(f"Spearman bootstrap {name}: {ratio:.0f} x a scipy loop (at least 100)")
    for name, ratio in permutations(repeats).items():
        print(f"permutation test, {name}: {ratio:.0f} x a scipy loop (at least 50)")
    print(f"BCa over percentile: {bca_over_percentile(repeats):.2f} x (at most 2)")
    for name, ratio in scaling(max(1, repeats // 3)).items():
        print(f"{name}: {ratio:.2f} x")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
