"""The same decomposition on a cluster, also when a worker dies under it."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import xarray as xr

from geomstats_lm.cube import open_study
from geomstats_lm.decompose import decompose
from tests.synthetic import activations

LABELS = [
    "mean", "token_mean", "diagonal", "affine", "low_rank[rank=3]", "orthogonal",
    "affine[scope=global]", "affine[scope=global+local]",
]  # fmt: skip


def cluster(workers):
    from dask.distributed import Client, LocalCluster

    return Client(
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
        )
    )


def thread_limits():
    import torch

    from geomstats_lm.neighbours import one_thread

    with one_thread():
        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def local_average(x, X, D, weights):
    return np.einsum("nk,nkd->nd", weights, D)


@pytest.mark.slow
def test_a_cluster_gives_the_same_bits(monkeypatch, tmp_path):
    from geomstats_lm import class_labels

    monkeypatch.setattr(class_labels, "_REGISTERED", {})
    class_labels.register_function_class("own", local_average)
    data = activations(documents=12, chunk_windows=2).persist(scheduler="synchronous")
    lazy = decompose(data, [*LABELS, "own"], k=16)
    here = lazy.compute(scheduler="synchronous")
    with cluster(2) as client:
        assert all(pair == (1, "1") for pair in client.run(thread_limits).values())
        there = lazy.compute()
        written = decompose(data, LABELS, k=16, store=tmp_path / "study.zarr", progress=False)
    xr.testing.assert_identical(here, there)
    xr.testing.assert_equal(written.compute(), here.sel(function_class=LABELS))


@pytest.mark.slow
def test_a_worker_that_dies_loses_nothing(tmp_path):
    data = activations(
        documents=24, dim=48, window=64, n_layers=3, chunk_windows=4
    ).persist(scheduler="synchronous")  # fmt: skip
    labels = ["mean", "affine", "affine[scope=global]"]
    expected = decompose(data, labels, k=16).compute(scheduler="synchronous")
    store = tmp_path / "study.zarr"
    killed = []
    with cluster(2) as client:

        def kill_one():
            # once some chunks of the store are there, the work is under way
            while not list(store.glob("tiny/decomposition/tokenwise/c/**/0")):
                time.sleep(0.01)
            victim = next(iter(client.run(os.getpid).values()))
            killed.append(victim)
            os.kill(victim, 9)

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        decompose(data, labels, k=16, store=store, progress=False)
        killer.join(timeout=10)
    assert killed
    xr.testing.assert_equal(open_study(store)["tiny/decomposition"].to_dataset(), expected)
