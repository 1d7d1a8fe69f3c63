"""What do capturing and storing cost beside the work itself?

    python tests/benchmarks/bench_cube.py extraction --model ../shared/data/models/stories260K
    python tests/benchmarks/bench_cube.py extraction loop disk compression large

Ratios of medians of interleaved repeats within one run; the machine's own speed cancels.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


def medians(tasks: dict, repeats: int, clock: str = "wall", before=lambda: None) -> dict:
    """Median seconds of each task, run in turn; on a shared machine CPU seconds say more."""
    seconds: dict = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            before()
            start = CLOCKS[clock]()
            task()
            seconds[name].append(CLOCKS[clock]() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def load(which: str):
    """A packaged or given model, or a 100 M-parameter GPT-2 of random weights."""
    import torch

    from geomstats_lm.models import as_language_model, load_model

    if which != "100M":
        return load_model(which)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(n_embd=768, n_layer=12, n_head=12, vocab_size=20_000, n_positions=512)
    return as_language_model(GPT2LMHeadModel(shape), name="random 100M")


def random_windows(vocabulary: int, n_tokens: int, length: int):
    from tests.model_samples import random_windows as make

    return make(n_tokens // length, length, vocabulary=vocabulary)


def bare_forward(model, ids, batch_size):
    import torch

    with torch.no_grad():
        for start in range(0, len(ids), batch_size):
            model.model(input_ids=torch.from_numpy(ids[start : start + batch_size]))


def extraction(args) -> None:
    """Forward, capture and write against the forward alone, same batches."""
    from geomstats_lm.extract import extract

    model = load(args.model)
    corpus = random_windows(model.vocabulary, args.tokens, args.length)
    ids = corpus.token_id.values.reshape(-1, args.length).astype(np.int64)
    folder = Path(tempfile.mkdtemp(dir=args.folder))

    def stored():
        extract(model, corpus, folder / "study", batch_size=args.batch, overwrite=True,
                progress=False)  # fmt: skip

    tasks = {"forward": lambda: bare_forward(model, ids, args.batch), "extract": stored}
    bare_forward(model, ids[: args.batch], args.batch)
    seconds = medians(tasks, args.repeats, args.clock)
    shutil.rmtree(folder)
    rate = {name: args.tokens / s for name, s in seconds.items()}
    print(
        f"extraction {model.name}: {args.tokens} tokens, {rate['forward']:,.0f} tokens/s bare, "
        f"{rate['extract']:,.0f} extracted, ratio {rate['extract'] / rate['forward']:.2f}"
    )


LOOP = """
import json, resource, sys, tempfile, time
sys.path[:0] = [{root!r}]
import numpy as np, torch
from tests.benchmarks.bench_cube import load, random_windows
from geomstats_lm.extract import extract
model = load({model!r})
corpus = random_windows(model.vocabulary, {tokens}, {length})
ids = torch.from_numpy(corpus.token_id.values.reshape(-1, {length}).astype(np.int64))
with torch.no_grad():
    model.model(input_ids=ids[: {batch}])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
with tempfile.TemporaryDirectory(dir={folder!r}) as folder:
    if {ours}:
        extract(model, corpus, folder + "/study", batch_size={batch}, progress=False)
    else:  # the loop that users write
        states = []
        with torch.no_grad():
            for i in range(0, len(ids), {batch}):
                output = model.model(input_ids=ids[i : i + {batch}], output_hidden_states=True)
                states.append(torch.stack(output.hidden_states).cpu())
        np.save(folder + "/states.npy", torch.cat(states, dim=1).numpy())
    seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, (peak - before) / 1024]))
"""


def loop(args) -> None:
    """Against output_hidden_states, a list, and np.save: tokens per second and peak memory."""
    found: dict[bool, list] = {True: [], False: []}
    for _ in range(args.repeats):
        for ours in (True, False):
            code = LOOP.format(
                root=str(ROOT), model=args.model, tokens=args.tokens, length=args.length,
                batch=args.batch, folder=str(args.folder or tempfile.gettempdir()), ours=ours,
            )  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
            )
            found[ours].append(json.loads(done.stdout.splitlines()[-1]))
    ours, theirs = (np.median(found[who], axis=0) for who in (True, False))
    print(
        f"loop {Path(args.model).name}: {args.tokens} tokens, {args.tokens / ours[0]:,.0f} against "
        f"{args.tokens / theirs[0]:,.0f} tokens/s, ratio {theirs[0] / ours[0]:.2f}; peak above the "
        f"model {ours[1]:,.0f} against {theirs[1]:,.0f} MB, ratio {ours[1] / theirs[1]:.2f}"
    )


def disk(args) -> None:
    """Write and read a leaf against tofile and fromfile of the same bytes in the same shapes.

    Both write new files, some seconds after the old ones went: a virtual machine hands freed
    memory back to its host by then, and memory taken anew costs five times what is still there.
    """
    import dask
    import dask.array as da
    import xarray as xr

    from geomstats_lm.cube import open_leaf, write_leaf

    folder = Path(tempfile.mkdtemp(dir=args.folder))
    n_layers, run, n_runs, dim = 12, 4096, 4, 768  # chunks of 12.6 MB, 604 MB in all
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1, n_layers, run * n_runs, dim)).astype(np.float32)
    dims = ("model", "layer", "token", "dim")
    made = xr.Dataset(
        {"hidden": (dims, da.from_array(values, chunks=(1, 1, run, dim), name=False))},
        {"model": ["m"], "layer": np.arange(n_layers), "token": np.arange(run * n_runs)},
    )
    blocks = list(made.hidden.data.to_delayed().ravel())  # both sides take them from dask
    files = [folder / f"{number}.bin" for number in range(len(blocks))]

    def removed():
        shutil.rmtree(folder)
        folder.mkdir()
        time.sleep(4)

    def to_files():
        dask.compute(*[dask.delayed(_tofile)(block, file) for block, file in zip(blocks, files)])

    def from_files():
        return dask.compute(*[dask.delayed(_fromfile)(file) for file in files])

    def to_store():
        write_leaf(made, folder / "study", "m", "activations", settings={}, progress=False)

    def from_store():
        leaf = open_leaf(folder / "study", "m", "activations")
        return dask.compute(*leaf.hidden.data.map_blocks(
            lambda b: b.sum(keepdims=True), chunks=(1, 1, 1, 1)).to_delayed().ravel())  # fmt: skip

    for scheduler in ("sync", "threads"):
        with dask.config.set(scheduler=scheduler):
            removed(), to_files(), to_store()
            seconds = medians(
                {"fromfile": from_files, "read": from_store}, args.repeats, args.clock
            )
            seconds |= medians(
                {"tofile": to_files, "write": to_store}, args.repeats, args.clock, removed
            )
        gigabytes = values.nbytes / 1e9
        print(
            f"disk, dask scheduler {scheduler}: write {gigabytes / seconds['write']:.2f} against "
            f"{gigabytes / seconds['tofile']:.2f} GB/s, ratio "
            f"{seconds['tofile'] / seconds['write']:.2f}; read {gigabytes / seconds['read']:.2f} "
            f"against {gigabytes / seconds['fromfile']:.2f} GB/s, ratio "
            f"{seconds['fromfile'] / seconds['read']:.2f}"
        )
    shutil.rmtree(folder)


def _tofile(block, file) -> None:
    block.tofile(file)


def _fromfile(file) -> float:
    return np.fromfile(file, np.float32).sum()


def compression(args) -> None:
    """What Zarr's codecs save and cost on the states of a trained model on text."""
    import zarr
    from zarr.codecs import BloscCodec, ZstdCodec

    from geomstats_lm.corpus import read_corpus, windows
    from geomstats_lm.extract import extract

    model = load(args.model)
    corpus = read_corpus(args.text, separator=args.separator)
    cut = windows(corpus, model.tokenizer, length=args.length,
                  n_windows=args.tokens // args.length)  # fmt: skip
    states = extract(model, cut, progress=False).hidden.values
    codecs = {
        "none": None,
        "zstd": ZstdCodec(level=3),
        "blosc lz4 shuffle": BloscCodec(cname="lz4", shuffle="shuffle"),
        "blosc zstd bitshuffle": BloscCodec(cname="zstd", shuffle="bitshuffle"),
    }
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    for dtype in ("float32", "float16"):
        values = states.astype(dtype)
        arrays = {
            name: zarr.create_array(
                str(folder / f"{dtype} {name}"), shape=values.shape, dtype=dtype,
                chunks=(1, 1, *values.shape[2:]), compressors=codec,
            )
            for name, codec in codecs.items()
        }  # fmt: skip
        tasks = {}
        for name, array in arrays.items():
            tasks[name, "write"] = lambda a=array, v=values: a.__setitem__(slice(None), v)
            tasks[name, "read"] = lambda a=array: a[:]
        seconds = medians(tasks, args.repeats, args.clock)
        for name, array in arrays.items():
            size = array.nbytes_stored() / values.nbytes
            slower = {do: seconds[name, do] / seconds["none", do] for do in ("write", "read")}
            print(
                f"compression {dtype} {name}: {size:.2f} of the bytes, write "
                f"{slower['write']:.1f}x and read {slower['read']:.1f}x the time"
            )
    shutil.rmtree(folder)


def large(args) -> None:
    """A cube of ``--gigabytes`` written, decomposed with `diagonal` and summarised; peak memory."""
    import dask
    import dask.array as da
    import xarray as xr

    from geomstats_lm.cube import open_study, write_leaf
    from geomstats_lm.decompose import decompose
    from geomstats_lm.geometry import geometry
    from tests.cube_samples import token_labels

    folder = Path(tempfile.mkdtemp(dir=args.folder))
    n_layers, dim, length = 13, 768, 128
    n_windows = int(args.gigabytes * 1e9 / (n_layers * dim * 4 * length))
    n_tokens, run = n_windows * length, 32 * length
    n_reference = min(args.reference, n_windows - 1) * length
    directions = np.random.default_rng(0).normal(size=(8, dim)).astype(np.float32)

    def states(block_info=None):
        """A walk over layers: what a token carries, and a step that depends on it."""
        layer, token = (block_info[None]["chunk-location"][i] for i in (1, 2))
        size = block_info[None]["chunk-shape"]
        weights = np.random.default_rng([1, token]).normal(size=(size[2], 8)).astype(np.float32)
        noise = np.random.default_rng([2, layer, token]).normal(size=size[2:]).astype(np.float32)
        return ((1 + 0.1 * layer) * weights @ directions + noise)[None, None]

    sizes = [run] * (n_tokens // run) + ([n_tokens % run] if n_tokens % run else [])
    hidden = da.map_blocks(
        states, chunks=((1,), (1,) * n_layers, tuple(sizes), (dim,)), dtype=np.float32
    )
    made = xr.Dataset(
        {"hidden": (("model", "layer", "token", "dim"), hidden)},
        {
            "model": ["m"], "layer": np.arange(n_layers),
            "depth": ("layer", np.arange(n_layers) / (n_layers - 1)),
            **token_labels(n_tokens, length, n_reference),
        },
        {"window_length": length, "n_layers": n_layers - 1},
    )  # fmt: skip
    print(
        f"large: {hidden.nbytes / 1e9:.1f} GB, {n_tokens} tokens, {n_reference} of them reference"
    )

    def told(step, start):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"  {step}: {time.perf_counter() - start:.0f} s, peak {peak:,.0f} MB", flush=True)

    with dask.config.set(scheduler="threads", num_workers=2):
        start = time.perf_counter()
        write_leaf(made, folder / "study", "m", "activations", settings={}, progress=False)
        told("written", start)
        node = open_study(folder / "study")["m"]
        start = time.perf_counter()
        parts = decompose(
            node, classes=["diagonal"], reference=args.cap, progress=False,
            store=folder / "study" if args.keep else None,
        )  # fmt: skip
        told("decomposed" if args.keep else "decomposition declared", start)
        start = time.perf_counter()
        geometry(parts, store=folder / "study", progress=False)
        told("geometry and its summaries", start)
    shutil.rmtree(folder)


TASKS = {f.__name__: f for f in (extraction, loop, disk, compression, large)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument(
        "--model", default="100M", help="folder of a model, or 100M: random weights"
    )
    parser.add_argument("--text", default="", help="text file, for compression")
    parser.add_argument("--separator", default=None)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--reference", type=int, default=120, help="windows, for large")
    parser.add_argument("--cap", type=int, help="most reference tokens to use, for large")
    parser.add_argument("--keep", action="store_true", help="store the decomposition, for large")
    parser.add_argument("--folder", default=None, help="where to write")
    args = parser.parse_args()
    for name in args.tasks:
        TASKS[name](args)


if __name__ == "__main__":
    main()
