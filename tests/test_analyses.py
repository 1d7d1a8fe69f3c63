"""The analyses: each writes its tables, and the table of claims is what numpy makes of the store.

What is recomputed uses the store's arrays and numpy alone: no function of the package.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

ROOT = Path(__file__).parent.parent
ANALYSES = ROOT / "analyses"
SCRIPTS = (
    "alignment", "function_classes", "output_perturbation", "across_architectures",
    "what_is_forced", "training_time", "out_of_core",
)  # fmt: skip
TABLES = {
    "alignment": ("alignment", "nulls"),
    "function_classes": ("capacity", "reference_curve", "reference_limits"),
    "output_perturbation": ("correlations", "damage_ratio", "dose_response"),
    "across_architectures": ("correlations", "explained", "studies"),
    "what_is_forced": ("what_is_forced",),
    "training_time": ("training",),
    "out_of_core": ("out_of_core",),
}
K, RIDGE = 32, 1.0


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, ANALYSES / f"{name}.py", *map(str, arguments)], text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=1500,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_reads_like_a_methods_section(name: str) -> None:
    text = (ANALYSES / f"{name}.py").read_text(encoding="utf-8")
    question = ast.get_docstring(ast.parse(text))
    assert question is not None and question.splitlines()[0].endswith("?")
    assert len(text.splitlines()) < 150
    assert len(re.findall(r"^# %% ", text, flags=re.MULTILINE)) >= 3
    listed = (ANALYSES / "README.md").read_text(encoding="utf-8")
    assert f"python analyses/{name}.py" in listed


def test_help_and_errors_name_what_is_accepted(tmp_path) -> None:
    shown = run("alignment", "--help")
    assert shown.returncode == 0, shown.stderr
    for option in ("--store", "--models", "--out", "--windows", "--n-boot"):
        assert option in shown.stdout
    wrong = run("what_is_forced", "--models", "gpt7")
    assert wrong.returncode == 2 and "--models: gpt7" in wrong.stderr and "mamba2" in wrong.stderr
    missing = run("training_time", "--store", tmp_path / "nowhere" / "study.zarr")
    assert missing.returncode == 2 and "there is no folder" in missing.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, list[str | Path]]:
    """A folder, and options that make every script small."""
    folder = tmp_path_factory.mktemp("analyses")
    return folder, [
        "--store", folder / "study.zarr", "--windows", "24", "12", "--length", "32",
        "--n-boot", "99",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def claims(small) -> tuple[xr.DataTree, pd.DataFrame]:
    folder, options = small
    done = run("what_is_forced", *options, "--models", "gpt2", "--out", folder / "what_is_forced")
    assert done.returncode == 0, done.stderr
    node = xr.open_datatree(folder / "study.zarr", engine="zarr", chunks={})["gpt2"]
    return node, pd.read_csv(folder / "what_is_forced" / "what_is_forced.csv")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_writes_its_tables_and_figures(name: str, small, claims) -> None:
    folder, options = small
    models = {
        "training_time": ["gpt2-untrained", "gpt2"], "across_architectures": ["gpt2", "mamba2"],
    }.get(name, ["gpt2"])  # fmt: skip
    more = {
        "function_classes": ["--k", "8", "32", "--ridge", "0.1", "1", "--rank", "2", "4",
                             "--hidden", "2", "--query-windows", "4"],
        "alignment": ["--draws", "2"],
        "out_of_core": ["--scales", "1", "--workers", "1"],
    }.get(name, [])  # fmt: skip
    out = folder / name
    done = run(name, *options, "--models", *models, "--out", out, *more)
    assert done.returncode == 0, done.stderr
    for table in TABLES[name]:
        frame = pd.read_csv(out / f"{table}.csv")
        assert len(frame) and np.isfinite(frame["estimate"]).any()
        page = (out / f"{table}.md").read_text(encoding="utf-8")
        assert f"python analyses/{name}.py" in page and "95 %" in page
    figures = list(out.glob("*.png"))
    assert figures or name == "out_of_core"
    assert all(3_000 < figure.stat().st_size < 400_000 for figure in figures)


def cell(table: pd.DataFrame, layers: str, quantity: str, column: str = "estimate") -> float:
    found = table[table["layers"].str.startswith(layers) & (table["quantity"] == quantity)]
    assert len(found) == 1, (layers, quantity, len(found))
    return float(found[column].iloc[0])


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


class Store:
    """The arrays of one model, as numpy."""

    def __init__(self, node: xr.DataTree) -> None:
        self.activations = node["activations"].to_dataset()
        self.hidden = self.activations.hidden.values[0].astype(float)  # (layer, token, dim)
        self.evaluation = self.activations.split.values == 1
        self.counts = (self.activations.position.values > 0) & ~self.activations.is_special.values
        self.parts = node["decomposition"].to_dataset().sel(function_class="affine").isel(model=0)
        self.perturbation = node["perturbation"].to_dataset().sel(function_class="affine")
        self.subspace = node["subspace"].to_dataset().sel(function_class="affine").isel(model=0)

    def usable(self, layer: int) -> np.ndarray:
        """Of the evaluation tokens."""
        massive = self.parts.is_massive.sel(layer=layer).values
        return self.counts[self.evaluation] & ~massive

    def reference(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """States and updates of reference tokens, none of them massive."""
        before, after = self.hidden[layer - 1], self.hidden[layer]
        keep = ~self.evaluation & self.counts
        for states in (before, after):
            size = np.sqrt((states**2).sum(-1))
            keep = keep & (size <= 5 * np.median(size[~self.evaluation & self.counts]))
        return before[keep], (after - before)[keep]

    def vectors(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """State before, update and tokenwise part of usable evaluation tokens."""
        rows = self.usable(layer)
        before = self.hidden[layer - 1][self.evaluation][rows]
        after = self.hidden[layer][self.evaluation][rows]
        tokenwise = self.parts.tokenwise.sel(layer=layer).values.astype(float)[rows]
        return before, after - before, tokenwise


@pytest.mark.slow
def test_alignment_cells_by_hand(claims) -> None:
    node, table = claims
    store, of_states, identity, centred, explained, forced = Store(node), [], [], [], [], []
    for layer in (2, 3):
        before, update, tokenwise = store.vectors(layer)
        of_states.append(cosine(before + update, before + tokenwise).mean())
        identity.append(cosine(before + update, before).mean())
        mean = store.reference(layer)[1].mean(0)
        lost = ((update - tokenwise) ** 2).sum(-1)
        error = np.sqrt(lost / ((update - mean) ** 2).sum(-1))
        along = cosine(update - mean, tokenwise - mean)
        centred.append(along[error < 1].mean())
        forced.append(np.sqrt(1 - error[error < 1] ** 2).mean())
        explained.append(1 - lost.sum() / ((update - mean) ** 2).sum())
    for quantity, values in (
        ("state cosine", of_states), ("state cosine of T = identity", identity),
        ("centred update explained", explained),
    ):  # fmt: skip
        assert cell(table, "2-3", quantity) == pytest.approx(np.mean(values), abs=2e-5)
    both = table[table["quantity"] == "centred cosine"]
    for role, values in (("honest", centred), ("forced", forced)):
        found = cell(both[both["role"] == role], "2-3", "centred cosine")
        assert found == pytest.approx(np.mean(values), abs=1e-4)


@pytest.mark.slow
def test_residual_cells_by_hand(claims) -> None:
    node, table = claims
    store = Store(node)
    for layer, group in ((1, "1 "), (6, "6 ")):
        _, update, tokenwise = store.vectors(layer)
        residual = update - tokenwise
        angle = np.degrees(np.arccos(cosine(residual, tokenwise)))
        assert cell(table, group, "cosine, held-out") == pytest.approx(
            cosine(residual, tokenwise).mean(), abs=2e-5
        )
        assert cell(table, group, "degrees, held-out") == pytest.approx(angle.mean(), abs=2e-3)
        one = table[table["quantity"] == "angle_residual_tokenwise"]
        assert cell(one, group, "angle_residual_tokenwise", "forced") == 90
        assert cell(one, group, "angle_residual_tokenwise") == pytest.approx(
            angle.mean() - 90, abs=2e-3
        )
        # energy of the centred residual in the directions that hold most of the reference's
        basis = store.subspace.tokenwise_basis.sel(layer=layer).values.astype(float)
        centre = store.subspace.tokenwise_centre.sel(layer=layer).values.astype(float)
        mean = store.reference(layer)[1].mean(0)
        rest = (update - mean) - (tokenwise - centre)
        energy = ((rest @ basis.T) ** 2).sum(-1) / (rest**2).sum(-1)
        found = cell(table, group, "residual, held-out and centred")
        assert found == pytest.approx(energy.mean(), abs=2e-5)
        assert cell(table, group, "energy_residual", "forced") == pytest.approx(16 / 192)


@pytest.mark.slow
def test_self_included_fit_by_hand(claims) -> None:
    """Layer 6: every token among the k tokens that its own affine map is fitted on."""
    node, table = claims
    store, aligned, angles = Store(node), [], []
    states, updates = store.reference(6)
    before, update, _ = store.vectors(6)
    centre = states.mean(0)
    for x, own in zip(before, update):
        nearest = np.argsort(((states - x) ** 2).sum(-1), kind="stable")[: K - 1]
        around = np.vstack([x, states[nearest]]) - centre
        moved = np.vstack([own, updates[nearest]])
        dx, dy = around - around.mean(0), moved - moved.mean(0)
        gram = dx @ dx.T
        ridge = RIDGE * np.trace(gram) / K + 1e-6 * (around.mean(0) ** 2).sum()
        weights = np.linalg.solve(gram + ridge * np.eye(K), dx @ (x - centre - around.mean(0)))
        tokenwise = moved.mean(0) + dy.T @ weights
        aligned.append((cosine(own, tokenwise), np.sum((own - tokenwise) ** 2) < np.sum(own**2)))
        angles.append(np.degrees(np.arccos(cosine(own - tokenwise, tokenwise))))
    kept = [value for value, below_one in aligned if below_one]
    leaked = table[table["quantity"] == "self-included neighbours"]
    by_claim = dict(list(leaked.groupby("claim")))
    (first,) = [v for k, v in by_claim.items() if "almost perfectly" in k]
    (angle,) = [v for k, v in by_claim.items() if "large angle" in k]
    assert cell(first, "6 ", "self-included neighbours") == pytest.approx(np.mean(kept), abs=1e-4)
    assert cell(angle, "6 ", "self-included neighbours") == pytest.approx(np.mean(angles), abs=0.02)


@pytest.mark.slow
def test_correlation_cells_by_hand(claims) -> None:
    node, table = claims
    store = Store(node)
    patched = store.perturbation.isel(model=0)
    real, size, ratio = [], [], []
    for layer in (4, 5):
        rows = store.usable(layer)
        _, update, tokenwise = store.vectors(layer)
        norm = np.sqrt(((update - tokenwise) ** 2).sum(-1))
        at = patched.sel(layer=layer, positions="single")
        kl = at.kl.values[rows]
        control = at.kl_control.sel(control="exchanged").values.mean(0)[rows]
        seen = np.isfinite(kl)
        real.append(stats.spearmanr(norm[seen], kl[seen]).statistic)
        size.append(stats.spearmanr(norm[seen], control[seen]).statistic)
        ratio.append((kl[seen].sum(), control[seen].sum()))
    pooled = np.tanh(np.mean(np.arctanh(real)))
    alone = np.tanh(np.mean(np.arctanh(size)))
    assert cell(table, "4-5", "single positions") == pytest.approx(pooled, abs=2e-3)
    assert cell(table, "4-5", "single positions, size alone") == pytest.approx(alone, abs=2e-3)
    less = cell(table, "4-5", "single positions, less size")
    assert less == pytest.approx(pooled - alone, abs=3e-3)
    done, control = np.sum(ratio, axis=0)
    found = cell(table, "4-5", "damage ratio, single positions")
    assert found == pytest.approx(done / control, rel=1e-5)
    everything = patched.kl.sel(positions="single").values
    norms = [
        np.sqrt(((store.parts["update"] - store.parts.tokenwise).sel(layer=layer) ** 2).sum("dim"))
        for layer in range(1, 7)
    ]
    seen = np.isfinite(everything) & np.stack([store.usable(layer) for layer in range(1, 7)])
    rho = stats.spearmanr(np.stack(norms)[seen], everything[seen]).statistic
    found = cell(table, "all", "tokens of all layers, single positions")
    assert found == pytest.approx(rho, abs=2e-3)
    verdicts = table[table["role"] == "difference"]["verdict"]
    assert verdicts.str.contains("distinct from|no verdict").all()
