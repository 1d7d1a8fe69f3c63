# ruff: noqa: E402 (the math libraries read their thread limits when imported)
"""How fast are neighbours, fits and the whole decomposition?  Medians of interleaved ratios.

    python tests/benchmarks/bench_decompose.py [neighbours] [fits] [whole] [--tokens 20000]
    python tests/benchmarks/bench_decompose.py sklearn dask memory --dims 768 --tokens 100000

Every pair is timed in one process, turn by turn, in CPU seconds of the calling thread with one
math thread, so that other work on the machine disturbs both sides alike; the part dask is timed
by the clock and needs two idle cores.  faiss and scikit-learn are used where they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, os.getcwd())

import dask
import numpy as np
import torch
import xarray as xr

from geomstats_lm.class_labels import parse_classes
from geomstats_lm.decompose import decompose
from geomstats_lm.function_classes import Neighbourhoods, local_predictions
from geomstats_lm.neighbours import half_squared_norms, nearest
from tests.synthetic import activations

K = 32
ALL = ["local_mean", "scalar", "diagonal", "linear", "affine", "low_rank[rank=4]", "orthogonal"]


def compare(title, ours, other, repeats, aim, units=(1, 1)):
    """Print the median of other / ours per unit of work over interleaved repeats."""
    ours(), other()
    ratios, own = [], []
    for _ in range(repeats):
        start = time.thread_time()
        ours()
        middle = time.thread_time()
        other()
        own.append((middle - start) / units[0])
        ratios.append((time.thread_time() - middle) / units[1] / own[-1])
    print(
        f"{title:64s} {np.median(ratios):9.2f}   aim {aim:6s} ours {1e6 * np.median(own):9.1f} us",
        flush=True,
    )


def sample(n_reference, d, n):
    rng = np.random.default_rng(0)
    states, targets = rng.normal(size=(2, n_reference, d)).astype(np.float32)
    return states, targets, rng.normal(size=(n, d)).astype(np.float32)


def bench_neighbours(n_reference, d, repeats):
    try:
        import faiss
    except ImportError:
        print("faiss is not installed: neighbours are not compared")
        return
    faiss.omp_set_num_threads(1)
    states, _, queries = sample(n_reference, d, 512)
    index = faiss.IndexFlatL2(d)
    index.add(states)
    norms = half_squared_norms(states)
    compare(
        f"neighbours: faiss IndexFlatL2 / ours, N={n_reference} d={d}",
        lambda: nearest(queries, states, K, half_norms=norms),
        lambda: index.search(queries, K), repeats, ">=0.9", (512, 512),
    )  # fmt: skip


def numpy_diagonal(x, X, D, ridge=1.0):
    mean_x, mean_d = X.mean(1), D.mean(1)
    A, B = X - mean_x[:, None], D - mean_d[:, None]
    size = np.sum(A**2, 1)
    size = size + ridge * size.mean(1, keepdims=True)
    return mean_d + (x - mean_x) * np.sum(A * B, 1) / size


def torch_low_rank(x, X, D, rank=4, ridge=0.01):
    K = X @ X.mT
    values, vectors = torch.linalg.eigh(K)
    total = values + ridge * values.sum(1, keepdim=True) / X.shape[1]
    w = vectors @ ((vectors.mT @ (X @ x[..., None])) / total[..., None])
    root = vectors * (values.clamp_min(0) / total).sqrt()[:, None]
    G = D @ D.mT
    s, W = torch.linalg.eigh(root.mT @ G @ root)
    s, W = s[:, -rank:], W[:, :, -rank:]
    b = root @ (W @ ((W.mT @ (root.mT @ (G @ w))) / s[..., None]))
    return (D.mT @ b)[..., 0]


def bench_fits(n_reference, d, repeats):
    n = 256
    states, targets, queries = sample(n_reference, d, n)
    rows, distances = nearest(queries, states, K)
    data = Neighbourhoods(queries, rows, distances, states, np.zeros(d, np.float32), targets)

    def fits(*labels):
        classes = parse_classes(labels)
        return lambda: local_predictions(classes, data, k=K)

    where = f"N={n_reference} d={d}"
    a, b, c = torch.randn(1024, d), torch.randn(d, 1024), torch.empty(1024, 1024)
    nominal = 2 * K * K * d / (2 * 1024 * 1024 * d)  # sgemm time of a fit's nominal flops
    compare(
        f"linear: share of sgemm peak, {where}", fits("linear"),
        lambda: torch.mm(a, b, out=c), repeats, ">=0.5", (n, 1 / nominal),
    )  # fmt: skip
    compare(
        f"linear / affine, {where} (inverse of affine's relative time)", fits("affine"),
        fits("linear"), repeats, ">=0.77", (n, n),
    )  # fmt: skip
    compare(
        f"diagonal: vectorized numpy / ours, {where}", fits("diagonal"),
        lambda: numpy_diagonal(queries, states[rows], targets[rows]), repeats, ">=5", (n, n),
    )  # fmt: skip
    t_states, t_targets = torch.from_numpy(states), torch.from_numpy(targets)
    t_queries, t_rows = torch.from_numpy(queries), torch.from_numpy(rows)
    compare(
        f"low_rank(4): two batched torch eigh / ours, {where}", fits("low_rank[rank=4]"),
        lambda: torch_low_rank(t_queries, t_states[t_rows], t_targets[t_rows]), repeats, ">=3",
        (n, n),
    )  # fmt: skip

    def procrustes():
        X = states[rows[0]]
        left, _, right = np.linalg.svd((X + targets[rows[0]]).T @ X)
        return left @ (right @ queries[0])

    compare(
        f"orthogonal: d x d SVD per token / ours, {where}", fits("orthogonal"), procrustes,
        min(repeats, 3), ">=1000" if d >= 768 else "", (n, 1),
    )  # fmt: skip
    compare(
        f"all local classes, fits only: sum of one at a time / together, {where}", fits(*ALL),
        lambda: [fits(label)() for label in ALL], repeats, ">=1.67", (n, n),
    )  # fmt: skip
    compare(
        f"all local classes with the search: one at a time / together, {where}",
        lambda: (nearest(queries, states, K), fits(*ALL)()),
        lambda: [(nearest(queries, states, K), fits(label)()) for label in ALL], min(repeats, 3),
        ">=1.67", (n, n),
    )  # fmt: skip
    try:
        from sklearn.linear_model import Ridge
    except ImportError:
        print("scikit-learn is not installed: linear fits are not compared with Ridge")
        return

    def ridge_loop():
        for i in range(2):
            near = rows[i]
            model = Ridge(alpha=1.0, fit_intercept=False)
            model.fit(states[near], targets[near]).predict(queries[i : i + 1])

    compare(
        f"linear: scikit-learn Ridge per token / ours, {where}", fits("linear"), ridge_loop,
        repeats, ">=800" if d >= 768 else ">=2000", (n, 2),
    )  # fmt: skip


@contextlib.contextmanager
def stored(n_reference, d, n, n_layers=1):
    """A folder with activations as a store, and a function that decomposes them into another."""
    window = 128
    documents = (n_reference + n) // (2 * window)
    data = activations(
        n_layers=n_layers, dim=d, documents=documents, windows=2, window=window,
        split=n_reference / (n_reference + n), vocabulary=1000, chunk_windows=8,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data.to_zarr(f"{folder}/activations.zarr", zarr_format=3, consolidated=False)
        yield folder, lambda: whole(folder)


def whole(folder):
    data = xr.open_zarr(f"{folder}/activations.zarr", consolidated=False)
    decompose(data, ["linear"], store=f"{folder}/study.zarr", overwrite=True, progress=False)


def states_of(folder):
    """Centred reference and evaluation states, of the tokens that the decomposition uses."""
    data = xr.open_zarr(f"{folder}/activations.zarr", consolidated=False)
    hidden, split = data["hidden"].values[0, 0], data["split"].values
    usable = (split == 0) & (data["position"].values > 0)
    centre = hidden[usable].mean(0)
    return hidden[usable] - centre, hidden[split == 1] - centre


def bench_whole(n_reference, d, repeats):
    with (
        stored(n_reference, d, 8192) as (folder, ours),
        dask.config.set(scheduler="synchronous"),
    ):
        states, queries = states_of(folder)
        compare(
            f"search alone / decompose end to end (linear), N={len(states)} d={d}", ours,
            lambda: nearest(queries, states, K), repeats, ">=0.71", (len(queries), len(queries)),
        )  # fmt: skip


def bench_sklearn(n_reference, d, repeats):
    try:
        from sklearn.linear_model import Ridge
        from sklearn.neighbors import NearestNeighbors
    except ImportError:
        print("scikit-learn is not installed: the whole is not compared with it")
        return
    some = 64
    with (
        stored(n_reference, d, 8192) as (folder, ours),
        dask.config.set(scheduler="synchronous"),
    ):
        states, queries = states_of(folder)
        search = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(states)

        def per_token():
            rows = search.kneighbors(queries[:some], return_distance=False)
            for i in range(some):
                model = Ridge(alpha=1.0, fit_intercept=False)
                near = states[rows[i]]
                model.fit(near, near).predict(queries[i : i + 1])

        compare(
            f"NearestNeighbors + Ridge per token / decompose end to end, N={len(states)} d={d}",
            ours, per_token, repeats, ">=50" if d >= 768 else "", (len(queries), some),
        )  # fmt: skip


def bench_dask(n_reference, d, repeats):
    """By the clock: two workers against one, each with one thread, on four layers."""
    from dask.distributed import Client, LocalCluster

    with stored(n_reference, d, 8192, n_layers=4) as (_, ours):
        seconds = {1: [], 2: []}
        for _ in range(repeats):
            for workers, own in seconds.items():
                with (
                    LocalCluster(
                        n_workers=workers, threads_per_worker=1, dashboard_address=None
                    ) as cluster,
                    Client(cluster) as client,
                ):
                    client.run(lambda: __import__("geomstats_lm.layer_fits"))
                    ours()  # compiled kernels are loaded
                    start = time.perf_counter()
                    ours()
                    own.append(time.perf_counter() - start)
        ratio = np.median(np.divide(seconds[1], seconds[2]))
        print(
            f"one dask worker / two, N={n_reference} d={d}, 4 layers {ratio:9.2f}   aim >=1.7"
            f"   two {np.median(seconds[2]):.1f} s"
        )


MEASURE = """
import sys, dask
from tests.benchmarks.bench_decompose import whole
def size():  # ru_maxrss would begin at the parent's
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
before = size()
with dask.config.set(scheduler="synchronous"):
    whole(sys.argv[1])
print(size() - before)
"""


def bench_memory(n_reference, d, repeats):
    """Peak of a process that does nothing else, above the imports, the references and a chunk."""
    with stored(n_reference, d, 8192) as (folder, _):
        command = [sys.executable, "-c", MEASURE, folder]
        used = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    held = 2 * (n_reference + 8 * 128) * d * 4 / 2**30  # states before and after
    print(
        f"peak memory above references and a chunk, N={n_reference} d={d}: {used - held:.2f} GB"
        f"   aim <=1.5   ({used:.2f} GB in all, {held:.2f} held)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["neighbours", "fits", "whole"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[20000])
    parser.add_argument("--dims", type=int, nargs="+", default=[192, 768])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"medians of {options.repeats} interleaved ratios, higher is better for ours, k={K}")
    for part in options.parts:
        for d in options.dims:
            for n_reference in options.tokens:
                globals()[f"bench_{part}"](n_reference, d, options.repeats)


if __name__ == "__main__":
    main()
