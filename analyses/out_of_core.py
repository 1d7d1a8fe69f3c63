"""How is a dump of states that is larger than memory taken apart on a dask cluster?

dump on disk -> labelled cube -> D = t + r and its geometry, one chunk a task -> statistics;
a worker holds one layer's reference set and the chunks in flight, whatever the dump's size
"""

# %% A cluster: by default two processes here; any scheduler by its address
import importlib
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common
import numpy as np
import pandas as pd
from dask.distributed import Client, LocalCluster

import geomstats_lm as gl
from geomstats_lm.cube import open_node


def main() -> None:
    """All of it; processes of the cluster import this file, so nothing runs on import."""
    given = common.options(
        __doc__, models=["gpt2"], address="", workers=2, memory_limit="2GiB", scales=(1, 4)
    )
    store = given.store.with_name(f"{given.store.stem}-out-of-core.zarr")
    where = given.address or LocalCluster(
        n_workers=given.workers, threads_per_worker=1, memory_limit=given.memory_limit,
        dashboard_address=None,
    )  # fmt: skip
    with Client(where) as client:
        client.run(importlib.import_module, "geomstats_lm.decompose")
        rows = [
            measured(name, given, scale, store, client)
            for name in given.models
            for scale in given.scales
        ]
    if not given.address:
        where.close()
    common.keep(
        pd.DataFrame(rows), "out_of_core", given,
        ["Memory is the most that a process has held so far (resident, MiB), the largest worker's: "
         "before any work (python and its libraries) and after. A worker holds one layer's "
         "reference set and the chunks in flight; the client holds labels and graphs.",
         "estimate: r2_centred of the local affine map, mean over layers, with its 95 % interval "
         f"over documents; k = 32. {given.workers} workers of one thread, {given.memory_limit} "
         "each."],
    )  # fmt: skip


# %% One model: a dump as someone else may have left it, then import, decompose, measure
def measured(name: str, given: Any, scale: int, store: Path, client: Client) -> dict[str, Any]:
    """Take one model's dump through the verbs, and say what it took."""
    with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:  # keeps torch out of here
        dump = elsewhere.submit(write_dump, name, given, scale, store.with_suffix(".dump")).result()
    shutil.rmtree(store, ignore_errors=True)
    before = peak(), max(client.run(peak).values())
    # any folder of npy, safetensors, torch or Zarr files with states; or gl.extract(store=...)
    steps: dict[str, Callable[[], Any]] = {
        "import": lambda: gl.import_activations(
            dump / "states", dump / "labels.csv", store, model=name, progress=False
        ),
        # with a client open, dask sends every chunk to its cluster
        "decompose": lambda: gl.decompose(
            open_node(store, name), ["mean", "affine"], k=32, store=store, progress=False
        ),
        "geometry": lambda: gl.geometry(open_node(store, name), store=store, progress=False),
    }
    seconds = {}
    for step, do in steps.items():
        start = time.perf_counter()
        do()
        seconds[f"{step}_s"] = time.perf_counter() - start
    geometry = open_node(store, name)["geometry"].to_dataset()
    layers = {"all": geometry.layer.values.tolist()}
    means = gl.layer_means(geometry, ["r2_centred"], groups=layers, n_boot=given.n_boot).tidy()
    row = means.set_index("function_class").loc["affine"]
    states = open_node(store, name)["activations"].to_dataset().hidden
    return {
        "model": name, "n_tokens": states.sizes["token"], "N": int(geometry.n_reference.max()),
        "states_mib": states.nbytes / 2**20, "worker_before": before[1],
        "worker_after": max(client.run(peak).values()), "client_before": before[0],
        "client_after": peak(), **seconds, "estimate": row["estimate"],
        "conf_low": row["conf_low"], "conf_high": row["conf_high"], "documents": row["n_clusters"],
    }  # fmt: skip


# %% The dump, for want of someone else's
def write_dump(name: str, given: Any, scale: int, folder: Path) -> Path:
    """States of the model, one .npy file a layer, and a table of labels."""
    reference, evaluation = (scale * n for n in given.windows)
    cut = {"length": given.length, "n_windows": (reference, evaluation), "progress": False}
    states = gl.extract(common.load(name), gl.example_corpus(), **cut)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "states").mkdir(parents=True)
    for layer in states.layer.values:
        np.save(folder / "states" / f"layer_{layer}.npy", states.hidden.sel(layer=layer)[0].values)
    labels = states.coords.to_dataset()
    labels = labels[[n for n, c in labels.coords.items() if c.dims == ("token",)]]
    labels.to_dataframe().to_csv(folder / "labels.csv", index=False)
    return folder


# %% Memory, as the system counts it
def peak() -> float:
    """Most memory that this process has held, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
