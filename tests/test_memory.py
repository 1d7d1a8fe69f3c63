"""Memory is that of chunks and a reference set: four times the tokens take little more of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# All steps in one process; of each, the peak of resident memory so far, in MB.
STEPS = """
import json, resource, sys
import dask
from geomstats_lm import selection
from geomstats_lm.cube import open_study
from geomstats_lm.decompose import decompose
from geomstats_lm.extract import extract
from geomstats_lm.geometry import geometry
from tests.model_samples import random_windows, tiny_gpt2

selection.CHUNK_BYTES = (1 << 20, 1 << 20)
sys.modules["geomstats_lm.geometry"].TOKENS_PER_CHUNK = 4096
store, n_windows = sys.argv[1], int(sys.argv[2])
shape = {"n_embd": 256, "n_layer": 2}
peaks = {}

def told(step):
    peaks[step] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

with dask.config.set(scheduler="threads", num_workers=2):
    made = extract(tiny_gpt2(**shape), random_windows(n_windows, 32), store, progress=False)
    cube = made.hidden.nbytes / 1e6
    told("extract")
    node = open_study(store)["tiny"]
    decompose(node, ["mean", "diagonal"], k=8, reference=1024, store=store, progress=False)
    told("decompose")
    geometry(open_study(store)["tiny"], store=store, progress=False)
    told("geometry")
print(json.dumps([cube, peaks]))
"""


def peaks(store: Path, n_windows: int) -> tuple[float, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(store), str(n_windows)], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cube, found = json.loads(done.stdout.splitlines()[-1])
    return cube, found


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_cube(tmp_path: Path) -> None:
    small, at_small = peaks(tmp_path / "small", 600)
    large, at_large = peaks(tmp_path / "large", 2400)
    assert large == pytest.approx(4 * small) and large > 200
    for step, peak in at_large.items():
        # Labels and numbers per token do grow, by a fiftieth of the cube, and what the allocator
        # keeps varies by 40 MB from run to run.  The evaluation tokens of one layer with all
        # their parts, which nothing may hold at once, would grow by 0.65 of the cube's growth.
        assert peak - at_small[step] < 0.45 * (large - small), (step, at_small, at_large)
