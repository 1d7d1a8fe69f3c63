"""Killed at any moment, out of disk, or one of many: what is written in the end is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from geomstats_lm.cube import IncompleteError, has_leaf, open_leaf, prepare_leaf, write_leaf
from geomstats_lm.storage import list_leaves
from tests.cube_samples import activations, contents

ROOT = Path(__file__).parents[1]

# A step as a user runs it: 4 layers x 8 runs of tokens = 32 units of 64 kB.  The variables of the
# environment make it stop as the tests need it to.
STEP = """
import os, signal, sys, time
import dask
import numpy as np
import zarr.storage._local as local
from geomstats_lm import chunk_files
from geomstats_lm.cube import write_leaf
from tests.cube_samples import activations

store = sys.argv[1]
dies_in, fills_at = int(os.environ.get("DIES_IN", 0)), int(os.environ.get("FILLS_AT", 0))
put, put_chunk, chunks = local._put, chunk_files.put_chunk, []

def due(path):  # count one more file of a chunk or a tick: is it the one that something befalls?
    chunks.append(path)
    if fills_at and len(chunks) >= fills_at:
        import errno
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return len(chunks) == dies_in

def die(path, content):  # half of the file is there when the process dies
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".0123.partial").open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

def interrupted_chunk(path, values):
    if due(path):
        die(path, np.ascontiguousarray(values).tobytes())
    put_chunk(path, values)

def interrupted_put(path, value, exclusive=False):
    if "/c/" in str(path) and due(path):
        die(path, bytes(memoryview(value.as_buffer_like()).cast("B")))
    return put(path, value, exclusive)

chunk_files.put_chunk = interrupted_chunk
local._put = interrupted_put
made = activations(3, 128, 256, length=8, run=16)
slow = float(os.environ.get("PAUSE", 0))
made["hidden"] = made.hidden.copy(
    data=made.hidden.data.map_blocks(lambda b: (time.sleep(slow * (b.size > 0)), b)[1],
                                     dtype="f4", meta=np.empty((0,) * 4, "f4"))
)
print("ready", flush=True)
with dask.config.set(scheduler="threads", num_workers=2):
    write_leaf(made, store, "tiny", "activations", settings={"k": 1}, progress=False)
"""


def step(store, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", STEP, str(store)], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | {k: str(v) for k, v in environment.items()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(store):
    """The same command, in this process."""
    made = activations(3, 128, 256, length=8, run=16)
    return write_leaf(made, store, "tiny", "activations", settings={"k": 1}, progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    store = tmp_path_factory.mktemp("whole")
    finish(store)
    return contents(store)


def kill_at_random(store, seed, within):
    process = step(store, PAUSE=0.02)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    time.sleep(np.random.default_rng(seed).uniform(0, within))
    process.kill()
    process.communicate()


def kill_inside(store, chunk):
    process = step(store, DIES_IN=chunk)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert any(f.suffix == ".partial" for f in store.rglob("*"))  # it did die in the middle


def carries_on(store, whole):
    """The finished store is the uninterrupted one, byte for byte; what was ticked stays."""
    ticked = store / "tiny/activations/finished/c"
    before = {f: f.stat().st_mtime_ns for f in ticked.rglob("*") if f.suffix != ".partial"}
    if store.exists() and "tiny/activations" in list_leaves(store) and len(before) < 32:
        with pytest.raises(IncompleteError):
            open_leaf(store, "tiny", "activations")
    finish(store)
    assert contents(store) == whole
    assert all(f.stat().st_mtime_ns == at for f, at in before.items() if f.is_file())


# 32 units of one chunk of hidden, 8 of them with a chunk of loss too, and a tick after each: the
# labels take the first 11 files, so that 12..83 lie in the units
@pytest.mark.parametrize("chunk", [15, 57])
def test_killed_in_the_middle_of_a_file(tmp_path, whole, chunk):
    kill_inside(tmp_path / "study", chunk)
    carries_on(tmp_path / "study", whole)


def test_killed_at_a_random_moment(tmp_path, whole):
    kill_at_random(tmp_path / "study", seed=1, within=0.5)
    carries_on(tmp_path / "study", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_moments(tmp_path, whole, seed):
    kill_at_random(tmp_path / "study", seed, within=0.6)
    if seed % 3 == 0:  # and once more on the way back
        kill_at_random(tmp_path / "study", 100 + seed, within=0.4)
    carries_on(tmp_path / "study", whole)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 8, 12, 20, 33, 50, 70, 80])
def test_killed_in_the_middle_of_files(tmp_path, whole, chunk):
    kill_inside(tmp_path / "study", chunk)
    carries_on(tmp_path / "study", whole)


@pytest.mark.parametrize("chunk", [3, 40])
def test_a_disk_that_fills_up(tmp_path, whole, chunk):
    process = step(tmp_path / "study", FILLS_AT=chunk)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "No space left on device" in errors
    assert not has_leaf(tmp_path / "study", "tiny", "activations")
    carries_on(tmp_path / "study", whole)


def test_a_file_size_limit_of_the_system(tmp_path, whole):
    """The operating system itself cuts writes short: no half chunk may count as whole."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n{STEP}"
    limited = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + limited
    process = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path / "study")], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 1 and "File too large" in process.stderr
    carries_on(tmp_path / "study", whole)


# --- several writers ------------------------------------------------------------------------

PART = """
import sys, time
from pathlib import Path
import numpy as np
from geomstats_lm.cube import finish_leaf, prepare_leaf, token_runs, write_unit
from tests.cube_samples import activations

store, number, n_parts, go, settings = sys.argv[1:]
made = activations(3, 128, 256, length=8, run=16)
values = {name: v.values for name, v in made.data_vars.items()}
runs = token_runs(128, 16)
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.0005)
since = time.time()
grid = {"layer": [(i, i + 1) for i in range(4)], "token": runs}
finished = prepare_leaf(made, store, "tiny", "activations", settings={"k": int(settings)},
                        grid=grid)
every = slice(None)
for j in np.array_split(np.arange(len(runs)), int(n_parts))[int(number)]:
    run = slice(*runs[j])
    for layer in range(4):
        parts = {"hidden": values["hidden"][:, layer : layer + 1, run]}
        regions = {"hidden": (every, slice(layer, layer + 1), run, every)}
        if layer == 0:
            parts["loss"], regions["loss"] = values["loss"][:, run], (every, run)
        write_unit(store, "tiny", "activations", (layer, int(j)), parts, regions)
finish_leaf(store, "tiny", "activations", since=since)
"""


def writers(tmp_path, settings):
    """Processes that all set out at the same moment; their exit codes and what they said."""
    go = tmp_path / "go"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PART, str(tmp_path / "study"), str(i), str(len(settings)),
             str(go), str(made)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for i, made in enumerate(settings)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    go.touch()
    said = [process.communicate(timeout=120)[1] for process in processes]
    return [process.returncode for process in processes], said


def test_processes_create_and_fill_one_leaf_at_once(tmp_path, whole):
    codes, said = writers(tmp_path, [1, 1, 1, 1])
    assert codes == [0, 0, 0, 0], said
    assert contents(tmp_path / "study") == whole


def test_of_processes_with_other_settings_one_wins_and_the_other_is_told(tmp_path):
    codes, said = writers(tmp_path, [1, 2])
    assert sorted(codes) == [0, 1]
    told = said[codes.index(1)]
    assert "SettingsError" in told and "k: stored" in told
    assert len(list((tmp_path / "study/tiny/activations/finished/c").rglob("*"))) > 4


def test_threads_with_other_settings_never_mix(tmp_path):
    """Of many that create one leaf at once, all that succeed had the settings that are stored."""
    import threading

    for attempt in range(5):
        store, start, won, lost = tmp_path / str(attempt), threading.Barrier(4), [], []
        made = activations()
        grid = {"layer": [(0, 4)], "token": [(0, 8), (8, 16), (16, 24)]}

        def worker(number, made=made, store=store, start=start, won=won, lost=lost, grid=grid):
            start.wait()
            try:
                prepare_leaf(
                    made, store, "tiny", "activations", settings={"k": number % 2}, grid=grid
                )
                won.append(number % 2)
            except ValueError:
                lost.append(number % 2)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 2 and len(set(won)) == 1 and set(lost) == {1 - won[0]}


@pytest.mark.slow
def test_workers_of_a_cluster_fill_one_leaf(tmp_path, whole):
    from dask.distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
            local_directory=str(tmp_path / "workers"),
        ) as cluster,
        Client(cluster),
    ):  # fmt: skip
        finish(tmp_path / "study")
    assert contents(tmp_path / "study") == whole
