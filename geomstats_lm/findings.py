"""What do a study's leaves say to each question of the report?

Every statistic of tables, figures and sentences is computed here, once.  What a leaf that is
missing would have given is None, and ``missing`` says which leaf it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.cube import IncompleteError, has_leaf, list_leaves, open_leaf
from geomstats_lm.damage import damage_ratio
from geomstats_lm.geometry_summary import geometry_summary
from geomstats_lm.main_table import first_control, main_table
from geomstats_lm.merging import correlate
from geomstats_lm.statistics import RankCorrelation, meta_analysis
from geomstats_lm.storage import open_group
from geomstats_lm.tokenwise_share import tokenwise_share

BASELINES = ("identity", "mean", "token_mean", "local_mean")
JUDGED = ("angle_residual_tokenwise", "cos_update_tokenwise", "energy_residual")
HEAVY = ("activations", "parts", "decomposition", "subspace")
SMALL = 1 << 30  # bytes of a leaf that is held in memory
MOST_SUMMARY_BOOT = 999  # of bootstrap-t intervals, each resample of which is itself costly


@dataclass
class ModelFindings:
    """What is known of one model."""

    key: str
    leaves: dict[str, xr.Dataset]
    incomplete: list[str] = field(default_factory=list)
    unconverged: list[str] = field(default_factory=list)
    table: pd.DataFrame | None = None
    share: pd.DataFrame | None = None
    pooled_share: pd.DataFrame | None = None
    geometry: pd.DataFrame | None = None
    correlation: RankCorrelation | None = None
    pooled_correlation: RankCorrelation | None = None
    ratio: pd.DataFrame | None = None
    pooled_ratio: pd.DataFrame | None = None
    doses: pd.DataFrame | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """What made it, from whichever leaf is there."""
        found: dict[str, Any] = {}
        for name in ("activations", "decomposition", "geometry", "perturbation"):
            if name in self.leaves:
                found = {**self.leaves[name].attrs, **found}
        return found

    @property
    def main_class(self) -> str | None:
        """The class that sentences and examples are about: affine, else the first real fit."""
        for leaf in ("perturbation", "geometry"):
            if leaf in self.leaves:
                labels = [str(v) for v in self.leaves[leaf].function_class.values]
                fitted = [v for v in labels if v not in BASELINES]
                return "affine" if "affine" in labels else (fitted or labels)[0]
        return None


@dataclass
class Findings:
    """What is known of a study."""

    store: str
    models: list[ModelFindings]
    level: float
    n_boot: int
    synthesis: Any = None
    synthesis_reason: str = ""

    def together(self, name: str) -> pd.DataFrame | None:
        """One table of all models, or None where no model has it."""
        found = [f for f in (getattr(m, name) for m in self.models) if f is not None]
        frames = [f.tidy() if isinstance(f, RankCorrelation) else f for f in found]
        return pd.concat(frames, ignore_index=True) if frames else None


def find(
    store: str | Path,
    keys: Sequence[str],
    *,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    method: str = "spearman",
    norm: str = "raw",
    progress: bool = False,
) -> Findings:
    """Compute everything that a report shows.

    Parameters
    ----------
    store : str or Path
        Zarr store of the study.
    keys : sequence of str
        Models.
    level, n_boot, seed : float, int, int
        Of all intervals.
    method, norm : str
        Of the correlations, as in :func:`geomstats_lm.rank_correlation`.
    progress : bool
        Show a progress bar.

    Returns
    -------
    Findings
    """
    models = [ModelFindings(key, *_open(store, key)) for key in keys]
    return find_in(
        models, store=str(store), level=level, n_boot=n_boot, seed=seed, method=method, norm=norm,
        progress=progress,
    )  # fmt: skip


def find_in(
    models: Sequence[ModelFindings],
    *,
    store: str = "",
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    method: str = "spearman",
    norm: str = "raw",
    progress: bool = False,
) -> Findings:
    """The same of leaves that are open, or in memory.

    Parameters
    ----------
    models : sequence of ModelFindings
        With their leaves; what is found is put into them.
    store, level, n_boot, seed, method, norm, progress
        As for :func:`find`.

    Returns
    -------
    Findings
    """
    from tqdm.auto import tqdm

    how: dict[str, Any] = {"level": level, "n_boot": n_boot, "seed": seed}
    for model in tqdm(models, desc="statistics", disable=not progress, leave=False):
        with warnings.catch_warnings():
            # the report says once, in words, what every statistic would warn of
            warnings.filterwarnings("ignore", message=".*(clusters|documents).*")
            _geometry(model, how)
            _damage(model, how, {"method": method, "norm": norm})
    findings = Findings(store, list(models), level, n_boot)
    _synthesis(findings)
    return findings


def _open(store: str | Path, key: str) -> tuple[dict[str, xr.Dataset], list[str], list[str]]:
    """A model's leaves that questions are put to, those unfinished, and fits not converged.

    States and decompositions are large and slow to open; of them nothing is needed but what made
    them, which geometry and perturbation repeat, and whether fits converged.
    """
    names = [path.split("/", 1)[1] for path in list_leaves(store) if path.split("/")[0] == key]
    asked = [name for name in names if name not in HEAVY]
    leaves, incomplete = {}, []
    for name in asked or names:
        try:
            leaf = open_leaf(store, key, name)
        except IncompleteError:
            incomplete.append(name)
            continue
        # every statistic reads these again, so that what fits in memory is read once
        leaves[name] = leaf.compute() if name not in HEAVY and leaf.nbytes < SMALL else leaf
    unconverged = []
    if "decomposition" in names and has_leaf(store, key, "decomposition"):
        group = open_group(store, f"{key}/decomposition")
        if "converged" in group:
            converged = np.asarray(group["converged"][...], dtype=bool)[0]
            labels = np.asarray(group["function_class"][...]).tolist()
            whole = converged.reshape(len(labels), -1).all(axis=1)
            unconverged = [str(n) for n, good in zip(labels, whole) if not good]
    return leaves, incomplete, unconverged


def spans(layers: Any) -> dict[str, list[int]]:
    """Layer 1, the step from the embedding, and all others: the two rows of pooled tables."""
    numbers = sorted(int(v) for v in layers)
    rest = [v for v in numbers if v != 1]
    found = {"layer 1": [1]} if 1 in numbers else {}
    if rest:
        found[f"layers {rest[0]} to {rest[-1]}" if len(rest) > 1 else f"layer {rest[0]}"] = rest
    return found


def _geometry(model: ModelFindings, how: dict[str, Any]) -> None:
    geometry = model.leaves.get("geometry")
    if geometry is None:
        return
    groups = spans(geometry.layer.values)
    model.share = tokenwise_share(geometry, **how).tidy()
    model.pooled_share = tokenwise_share(geometry, groups=groups, **how).tidy()
    measures = [name for name in JUDGED if name in geometry]
    if measures:
        fewer = how | {"n_boot": min(how["n_boot"], MOST_SUMMARY_BOOT)}
        model.geometry = geometry_summary(geometry, measures=measures, **fewer).tidy()
    if "perturbation" not in model.leaves:
        model.table = main_table(geometry)


def _damage(model: ModelFindings, how: dict[str, Any], asked: dict[str, Any]) -> None:
    perturbation = model.leaves.get("perturbation")
    for leaf in model.leaves.values():
        if "factor" in leaf.coords and "kl_control" in leaf and model.doses is None:
            model.doses = damage_ratio(leaf, measure="kl", n_boot=2).tidy()
    if perturbation is None or "kl" not in perturbation:
        return
    if "replacement" in perturbation.dims:  # a whole residual is what all other tables are about
        names = perturbation.replacement.values.tolist()
        whole = "drop" if "drop" in names else names[-1]
        perturbation = perturbation.sel(replacement=whole).drop_vars(["replacement", "factor"],
                                                                     errors="ignore")  # fmt: skip
    model.leaves["perturbation"] = perturbation
    groups = spans(perturbation.layer.values)
    if "kl_control" in perturbation:
        first = perturbation.sel(control=[first_control(perturbation)])
        model.ratio = damage_ratio(first, measure="kl", **how).tidy()
        model.pooled_ratio = damage_ratio(first, measure="kl", groups=groups, **how).tidy()
    geometry = model.leaves.get("geometry")
    if geometry is None:
        return
    model.correlation = correlate(geometry, perturbation, **asked, **how)
    there = set(model.correlation.tidy()["layer"])
    kept = {n: [v for v in g if v in there] for n, g in groups.items()}
    model.pooled_correlation = model.correlation.pool("layer", {n: g for n, g in kept.items() if g})
    model.table = main_table(geometry, perturbation, model.correlation)


def _synthesis(findings: Findings) -> None:
    """Random effects over models of the correlation in the layers after the first."""
    pooled = [m.pooled_correlation.tidy() for m in findings.models if m.pooled_correlation]
    if len(pooled) < 2:
        findings.synthesis_reason = (
            f"a synthesis needs correlations of two models or more; the study has {len(pooled)}"
        )
        return
    frame = pd.concat(pooled, ignore_index=True)
    frame = frame[frame["layer_group"] != "layer 1"]
    usable = np.isfinite(frame["estimate"]) & (frame["std_error"] > 0)
    counts = frame[usable].groupby(["positions", "function_class"])["model"].nunique()
    several = set(counts[counts > 1].index)
    frame = frame[[key in several for key in zip(frame["positions"], frame["function_class"])]]
    if not len(frame):
        findings.synthesis_reason = "no function class has estimates in two models"
        return
    findings.synthesis = meta_analysis(
        frame, by=["positions", "function_class"], level=findings.level
    )
