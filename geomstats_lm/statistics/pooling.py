"""What do the correlations of several cells say together?

    estimate = tanh(mean over cells of arctanh(rho)),   the same in every shared resample b

Cells of one model were computed on the same resamples, so the interval of their mean keeps the
dependence between them; cells of different models were drawn apart and are averaged as independent.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.formula import check_known
from geomstats_lm.statistics.inference import fisher_z, infer, warn_of_few
from geomstats_lm.statistics.multiplicity import adjust_frame
from geomstats_lm.statistics.results import Result

LAST_COLUMNS = (
    "estimate",
    "std_error",
    "conf_low",
    "conf_high",
    "statistic",
    "p_value",
    "p_adjusted",
    "n",
    "n_clusters",
    "n_cells",
    "n_left_out",
    "n_missing",
    "n_degenerate",
    "method",
    "unit",
    "interval",
    "test",
    "converged",
    "reason",
)


@dataclass(repr=False)
class RankCorrelation(Result):
    """Correlations of many cells, with their bootstrap replicates.

    Attributes
    ----------
    by
        Columns that tell the rows apart.
    replicates
        Every row's value in every resample, dims (cell, boot); `cell` is the row of `estimates`.
    populations
        Which resamples each row used: rows with equal entries share them, shape (n_cells,).
    """

    by: tuple[str, ...] = ()
    populations: tuple[str, ...] = ()

    def pool(
        self,
        over: str = "layer",
        groups: Mapping[str, Sequence[Hashable]] | None = None,
        *,
        name: str | None = None,
        adjust_over: Sequence[str] | None = None,
    ) -> RankCorrelation:
        """Average over the cells of a dim, or over groups of its labels, with intervals.

        Parameters
        ----------
        over
            A column of `by`.
        groups
            Label of each group -> the labels of `over` in it; groups may overlap. None pools all.
        name
            Column that holds the group's label; by default `over` + "_group".
        adjust_over
            As in `rank_correlation`.

        Returns
        -------
        RankCorrelation
            One row per group; `estimate` is tanh of the mean Fisher z of its cells, `n` the sum
            of their observations, `n_cells` how many cells had an estimate. A cell without one is
            left out.

        Raises
        ------
        ValueError
            `over` is not a column of the table, or a group names a label that is not there.
        """
        check_known([over], self.by, "over")
        name = name or f"{over}_group"
        labels = self.estimates[over].tolist()
        if groups is None:
            groups = {"all": list(dict.fromkeys(labels))}
        for group, members in groups.items():
            missing = [member for member in members if member not in labels]
            if missing:
                raise ValueError(f"groups[{group!r}]: {missing} are not labels of {over!r}")
        by = tuple(column for column in self.by if column != over)
        keys = self.estimates[list(by)].apply(tuple, axis=1).tolist() if by else [()] * len(labels)
        rows, replicates, populations = [], [], []
        for key in dict.fromkeys(keys):
            for group, members in groups.items():
                chosen = [i for i, k in enumerate(keys) if k == key and labels[i] in members]
                row, pooled = self._pooled(chosen)
                rows.append({**dict(zip(by, key)), name: group, **row})
                replicates.append(pooled)
                populations.append("&".join(sorted({self.populations[i] for i in chosen})))
        settings = {**self.settings, "pooled_over": over}
        table = arrange(rows, (*by, name), {}, settings["adjust"], adjust_over)
        warn_of_few(table["n_clusters"])
        note = (
            f"Estimates are means over {over} of Fisher z, transformed back; n counts the "
            "observations of all cells of a group."
        )
        return RankCorrelation(
            title=f"{self.title}, pooled over {over}",
            estimates=table,
            fits=self.fits.assign(n_rows=len(table)),
            settings=settings,
            observations=self.observations,
            notes=[*self.notes, note],
            by=(*by, name),
            replicates=as_replicates(replicates, table, (*by, name)),
            populations=tuple(populations),
        )

    def _pooled(self, chosen: list[int]) -> tuple[dict[str, Any], np.ndarray]:
        cells = self.estimates.iloc[chosen]
        usable = [i for i in chosen if np.isfinite(self.estimates["estimate"].iloc[i])]
        values = self.replicates.values
        if usable:
            estimate = float(
                np.tanh(np.mean(fisher_z(self.estimates["estimate"].iloc[usable].to_numpy())))
            )
            replicates = np.tanh(fisher_z(values[usable]).mean(axis=0))
        else:
            estimate, replicates = np.nan, np.full(values.shape[1], np.nan)
        own = cells.assign(population=[self.populations[i] for i in chosen])
        n_clusters = int(own.groupby("population")["n_clusters"].max().sum())
        # BCa and bootstrap-t need what only the single cells had
        kind = self.settings["interval"]
        kind = kind if kind in ("percentile", "basic") else "percentile"
        row = infer(
            estimate,
            replicates,
            n_clusters=n_clusters,
            kind=kind,
            level=self.settings["level"],
            reason="" if usable else "no cell of the group has an estimate",
        )
        counted = {
            name: int(cells[name].sum())
            for name in ("n", "n_left_out", "n_missing")
            if name in cells
        }
        return {
            **row,
            **counted,
            "n_clusters": n_clusters,
            "n_cells": len(usable),
            "method": self.settings["method"],
            "unit": self.settings["unit"],
        }, replicates


def arrange(
    rows: list[dict[str, Any]],
    by: Sequence[str],
    coordinates: Mapping[str, dict],
    method: str | None,
    adjust_over: Sequence[str] | None,
) -> pd.DataFrame:
    """The tidy frame: by-columns and their coordinates, then the estimates in their fixed order."""
    frame = adjust_frame(pd.DataFrame(rows), method, over=adjust_over, by=by)
    for name, coordinate in coordinates.items():
        frame[name] = frame[coordinate["dim"]].map(coordinate["values"])
    last = [name for name in LAST_COLUMNS if name in frame]
    first = [*by, *coordinates]
    between = [name for name in frame if name not in {*first, *last}]
    return frame[[*first, *between, *last]]


def as_replicates(rows: list[np.ndarray], table: pd.DataFrame, by: Sequence[str]) -> xr.DataArray:
    """Replicates as (cell, boot), the by-columns as coordinates of cell."""
    return xr.DataArray(
        np.stack(rows) if rows else np.empty((0, 0)),
        dims=("cell", "boot"),
        coords={
            "cell": np.arange(len(table)),
            **{name: ("cell", table[name].to_numpy()) for name in by},
        },
        name="replicates",
    )
