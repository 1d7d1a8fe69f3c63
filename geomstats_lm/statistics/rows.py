"""How do labelled cells become rows of a table?

    rows = { (by-labels, estimate, interval, test), replicates, population : cell in data }

Reads the cells, a layer at a time, gives each to the array code in a thread of its own, and adds
permutation tests where they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from geomstats_lm.statistics.cells import Cell, Selection, read_cells
from geomstats_lm.statistics.estimates import (
    Manner,
    cluster_sums,
    estimate_levels,
    estimate_tokens,
    why_undefined,
)
from geomstats_lm.statistics.permutation import exchange_test, shift_test

Row = tuple[dict[str, Any], np.ndarray, str]  # columns, replicates, population


@dataclass(frozen=True)
class Permutations:
    """Which permutation test; see `rank_correlation`."""

    exchange: str | None
    sequence: str
    n_permutations: int
    seed: int


def available_cpus() -> int:
    """CPUs this process may use (which a container may keep below what the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def token_rows(
    data: xr.Dataset | pd.DataFrame,
    selection: Selection,
    populations: dict[str, pd.Index],
    counts: dict[str, np.ndarray],
    pool: ThreadPoolExecutor,
    manner: Manner,
    decompose_by: str | None,
    permutations: Permutations | None,
) -> list[Row]:
    """One row per cell, or three where cells are decomposed."""

    def one(cell: Cell) -> list[Row]:
        codes = populations[cell.population].get_indexer(cell.cluster)
        part = cell.extra[decompose_by] if decompose_by else None
        answers = estimate_tokens(cell.columns, codes, counts[cell.population], manner, part)
        left = {"n_left_out": cell.n_left_out, "n_missing": cell.n_missing}
        rows = []
        for row, replicates in answers:
            if permutations is not None:
                row |= _permuted(cell, codes, part, row.get("component"), manner, permutations)
            rows.append(({**cell.key, **row, **left}, replicates, cell.population))
        return rows

    return [
        row
        for cells in read_cells(data, selection)
        for rows in pool.map(one, cells)
        for row in rows
    ]


def _permuted(
    cell: Cell,
    cluster: np.ndarray,
    part: np.ndarray | None,
    component: str | None,
    manner: Manner,
    permutations: Permutations,
) -> dict[str, Any]:
    """The test's name and p-value for one row; the statistic permuted is the rank cross-product."""
    exchange = permutations.exchange or ("shift" if component == "within" else "clusters")
    if component == "between":
        exchange = "clusters"
    undefined = {"test": f"permutation ({exchange})", "p_value": np.nan}
    if why_undefined(cell.columns, manner.method):
        return undefined
    order = np.arange(len(cluster))
    if "position" in cell.extra:
        order = np.lexsort((cell.extra["position"], cell.extra[permutations.sequence], cluster))
    y, x = _without_controls(cell.columns, manner)[order].T
    cluster = cluster[order]
    part = None if part is None else part[order]
    choice = {"n_permutations": permutations.n_permutations, "seed": permutations.seed}
    if exchange == "shift":
        within = component == "within"
        sequence = part if part is not None and within else cell.extra[permutations.sequence][order]
        p_value, _ = shift_test(x, y, sequence, **choice)
    else:
        if component in ("within", "between") and part is not None:
            mean_x, mean_y = _part_means(x, part), _part_means(y, part)
            between = component == "between"
            x, y = (mean_x, mean_y) if between else (x - mean_x, y - mean_y)
        p_value, _ = exchange_test(x, y, cluster, **choice)
    return {**undefined, "p_value": p_value}


def _without_controls(columns: np.ndarray, manner: Manner) -> np.ndarray:
    """(n, 2): response and predictor, ranked for Spearman, less what the controls predict."""
    values = stats.rankdata(columns, axis=0) if manner.method == "spearman" else columns
    if columns.shape[1] == 2:
        return values
    controls = np.column_stack([np.ones(len(values)), values[:, 2:]])
    left = values[:, :2] - controls @ np.linalg.lstsq(controls, values[:, :2])[0]
    return np.column_stack([values[:, 0], left[:, 1]]) if manner.semipartial else left


def _part_means(values: np.ndarray, part: np.ndarray) -> np.ndarray:
    return (np.bincount(part, weights=values) / np.maximum(np.bincount(part), 1))[part]


def level_rows(
    data: xr.Dataset | pd.DataFrame,
    selection: Selection,
    unit: str,
    populations: dict[str, pd.Index],
    counts: dict[str, np.ndarray],
    pool: ThreadPoolExecutor,
    manner: Manner,
) -> list[Row]:
    """Cells that differ in the unit alone, reduced to sums per cluster, make one row."""
    tables: dict[tuple, dict[str, Any]] = {}
    for cells in read_cells(data, selection):
        for cell in cells:
            key = {name: value for name, value in cell.key.items() if name != unit}
            codes = populations[cell.population].get_indexer(cell.cluster)
            table = tables.setdefault(
                tuple(key.values()),
                {"key": key, "population": cell.population, "sums": [], "left": 0, "missing": 0},
            )
            n_clusters = len(populations[cell.population])
            table["sums"].append(cluster_sums(cell.columns, codes, n_clusters))
            table["left"] += cell.n_left_out
            table["missing"] += cell.n_missing

    def one(table: dict[str, Any]) -> Row:
        population = table["population"]
        ((row, replicates),) = estimate_levels(np.stack(table["sums"]), counts[population], manner)
        left = {"n_left_out": table["left"], "n_missing": table["missing"]}
        return {**table["key"], **row, **left}, replicates, population

    return list(pool.map(one, tables.values()))


def in_order(rows: list[Row], by: Sequence[str]) -> list[Row]:
    """Rows sorted by the first appearance of each by-label, however the layers were read."""
    seen: dict[str, dict] = {name: {} for name in by}
    for row, _, _ in rows:
        for name in by:
            seen[name].setdefault(row[name], len(seen[name]))
    return sorted(rows, key=lambda item: [seen[name][item[0][name]] for name in by])


def observations(data: xr.Dataset | pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """One row per observation that entered: values and their ranks within the cell."""
    frames = []
    association = selection.association
    for cells in read_cells(data, selection):
        for cell in cells:
            frame = pd.DataFrame(
                {
                    **{name: [value] * len(cell.columns) for name, value in cell.key.items()},
                    selection.cluster or "observation": cell.cluster,
                    association.response: cell.columns[:, 0],
                    association.predictor: cell.columns[:, 1],
                }
            )
            frame["rank_response"] = frame[association.response].rank()
            frame["rank_predictor"] = frame[association.predictor].rank()
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)
