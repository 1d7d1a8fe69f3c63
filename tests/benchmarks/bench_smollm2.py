"""What does a whole study of a real model cost, stage by stage?

    seconds on two free cores = CPU seconds / 2, at best

Run as `OMP_NUM_THREADS=2 python tests/benchmarks/bench_smollm2.py MODEL.gguf`: the study
`analyses/smollm2.toml` of that model, on the text that the package carries or on `--corpus`. A line
a stage: wall and CPU seconds, and the peak memory of the process up to its end. Interrupted with
Ctrl-C and run again on the same `--output`, it carries on and adds to what the stages took.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
STAGES = {  # stage -> where the function is that does it
    "read text": ("corpus", "read_corpus"), "load tokenizer": ("models", "load_tokenizer"),
    "cut windows": ("corpus", "windows"), "load model": ("models", "load_model"),
    "extract": ("extract", "extract"), "decompose": ("decompose", "decompose"),
    "geometry": ("geometry", "geometry"), "perturb": ("perturb", "perturb"),
    "tables and figures": ("report", "write_report_files"),
}  # fmt: skip


def used() -> tuple[float, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime, own.ru_maxrss / 1024**2


@contextmanager
def timed(took: dict[str, dict[str, float]]) -> Iterator[None]:
    """Within, the verbs note what they take; one called by another counts for the outer one."""
    import importlib

    inside: list[str] = []

    def watched(stage: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verb)
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return verb(*args, **kwargs)
            inside.append(stage)
            wall, cpu = time.perf_counter(), used()[0]
            try:
                return verb(*args, **kwargs)
            finally:
                inside.pop()
                spent, peak = used()
                row = took.setdefault(stage, {"wall_s": 0.0, "cpu_s": 0.0, "peak_gb": 0.0})
                row["wall_s"] += time.perf_counter() - wall
                row["cpu_s"] += spent - cpu
                row["peak_gb"] = max(row["peak_gb"], peak)
                print(f"{stage}: {row['cpu_s']:.1f} s of CPU", file=sys.stderr, flush=True)

        return run

    rooms = {}
    for stage, (room, verb) in STAGES.items():
        importlib.import_module(f"geomstats_lm.{room}")
        module = sys.modules[f"geomstats_lm.{room}"]
        rooms[module, verb] = getattr(module, verb)
        setattr(module, verb, watched(stage, getattr(module, verb)))
    try:
        yield
    finally:
        for (module, verb), original in rooms.items():
            setattr(module, verb, original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="GGUF file, or any other model")
    parser.add_argument("--study", type=Path, default=ROOT / "analyses" / "smollm2.toml")
    parser.add_argument("--corpus", help="text; by default the one that the package carries")
    parser.add_argument("--separator", help="between its documents, such as 'wikitext'")
    parser.add_argument("--windows", type=int, nargs=2, metavar=("REFERENCE", "EVALUATION"))
    parser.add_argument("--output", type=Path, help="kept there; thrown away by default")
    given = parser.parse_args()

    declared = tomllib.loads(given.study.read_text(encoding="utf-8"))
    model = declared["models"][0]
    model = model if isinstance(model, dict) else {"path": model}
    declared["models"] = [{**model, "path": given.model}]
    declared["corpus"] = given.corpus or str(_example_text())
    declared["separator"] = given.separator
    if given.windows:
        declared["windows"]["reference"], declared["windows"]["evaluation"] = given.windows
    with tempfile.TemporaryDirectory() as scratch:
        output = given.output or Path(scratch) / "study"
        output.mkdir(parents=True, exist_ok=True)
        print(stages_of({**declared, "output": str(output)}, output).to_string(index=False))


def stages_of(declared: dict[str, Any], output: Path) -> pd.DataFrame:
    from geomstats_lm.declaration import StudyConfig
    from geomstats_lm.study import run_study

    notes = output / "stages.json"
    took: dict[str, dict[str, float]] = json.loads(notes.read_text()) if notes.exists() else {}
    try:
        with timed(took):
            run_study(StudyConfig.model_validate(declared))
    finally:
        notes.write_text(json.dumps(took, indent=1))
    frame = pd.DataFrame.from_dict(took, orient="index").rename_axis("stage").reset_index()
    total = {"stage": "all", "wall_s": frame.wall_s.sum(), "cpu_s": frame.cpu_s.sum(),
             "peak_gb": frame.peak_gb.max()}  # fmt: skip
    frame = pd.concat([frame, pd.DataFrame([total])], ignore_index=True)
    frame["two_cores_s"] = frame["cpu_s"] / 2
    frame.round(2).to_csv(output / "stages.csv", index=False)
    return frame.round(2)


def _example_text() -> Path:
    from geomstats_lm.datasets import example_path

    return example_path("gpt2").parents[1] / "text" / "heldout.jsonl"


if __name__ == "__main__":
    main()
