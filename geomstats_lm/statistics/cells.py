"""Which observations make up each row of the table of results?

    cell = { observations | the dims in `by` fixed },   kept = no NaN in any column and not left out

Labelled data (a Dataset, lazy or not, or a frame) become plain arrays here, one layer at a time;
all that follows is array code. Pairs are masked jointly, before anything is ranked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.formula import Association, check_known, evaluate

DEFAULT_BY = ("model", "function_class", "positions", "control", "layer")
# leading dims of the project's cubes; those that the data lack are passed over when by= is one of
# these
USUAL_BY = (DEFAULT_BY, tuple(name for name in DEFAULT_BY if name != "control"))
LEAVE_OUT = ("is_special", "is_massive", "first_position")


@dataclass(frozen=True)
class Cell:
    """One row's observations: `columns` holds response, predictor, then controls, shape (n, k).

    `cluster` labels each observation's cluster, shape (n,); cells of one `population` (of one
    model) draw the same clusters in the same resample.
    """

    key: dict[str, Any]
    columns: np.ndarray
    cluster: pd.Index
    population: str
    extra: dict[str, np.ndarray]
    n_missing: int
    n_left_out: int


@dataclass(frozen=True)
class Selection:
    """Which variables of the data are read, and how rows are told apart."""

    association: Association
    by: tuple[str, ...]
    cluster: str | None
    leave_out: tuple[str, ...]
    nested_in: tuple[str, ...]
    groups: tuple[str, ...] = ()


def select(
    data: xr.Dataset | pd.DataFrame,
    association: Association,
    *,
    by: Sequence[str],
    cluster: str | None,
    leave_out: Sequence[str],
    nested_in: Sequence[str],
    groups: Sequence[str] = (),
) -> Selection:
    """Check every name against the data, and say which of the optional ones are there.

    Raises
    ------
    TypeError
        `data` is neither a Dataset nor a frame.
    ValueError
        A name is not in the data; nothing is left to correlate over.
    """
    if not isinstance(data, xr.Dataset | pd.DataFrame):
        raise TypeError(
            f"data: expected an xarray.Dataset or a DataFrame, got {type(data).__name__}"
        )
    known = _names(data)
    check_known(association.names, known)
    wanted = (by,) if isinstance(by, str) else tuple(by)
    if wanted not in USUAL_BY:
        check_known(wanted, known, "by")
    if cluster is not None:
        check_known([cluster], known, "cluster")
    check_known(groups, known, "data")
    unknown = [flag for flag in leave_out if flag not in LEAVE_OUT and flag not in known]
    check_known(unknown, [*known, *LEAVE_OUT], "leave_out")
    present = tuple(name for name in wanted if name in known)
    if isinstance(data, xr.Dataset):
        dims = {str(dim) for name in association.names for dim in data[name].dims}
        # a dim of the data that no variable of the formula has cannot tell its rows apart
        present = tuple(
            name for name in present if name in dims or (name not in data.dims and name in known)
        )
        if not dims - set(present):
            raise ValueError(
                f"by={present} leaves no dimension of {sorted(dims)} to correlate over"
            )
    return Selection(
        association,
        present,
        cluster,
        tuple(flag for flag in leave_out if flag in known or flag == "first_position"),
        tuple(nested_in),
        tuple(groups),
    )


def _names(data: xr.Dataset | pd.DataFrame) -> list[str]:
    names = data.variables if isinstance(data, xr.Dataset) else data.columns
    dims = data.dims if isinstance(data, xr.Dataset) else ()
    return [str(name) for name in dict.fromkeys([*names, *dims])]


def read_cells(data: xr.Dataset | pd.DataFrame, selection: Selection) -> Iterator[list[Cell]]:
    """Cells of the data, a list at a time: one layer's, so that memory holds one layer."""
    if isinstance(data, pd.DataFrame):
        columns = {str(name): data[name].to_numpy() for name in _needed(data, selection)}
        yield _grouped(columns, selection.by, {}, selection)
        return
    subset = _numbered(data)[_needed(data, selection)].reset_coords()
    by_dims = [name for name in selection.by if name in subset.dims]
    by_coordinates = tuple(name for name in selection.by if name not in by_dims)
    read = [*selection.association.names, *by_coordinates]
    layerless = [name for name in subset.variables if "layer" not in subset[name].dims]
    subset = subset.assign({name: subset[name].load() for name in layerless})
    blocks: Iterator[xr.Dataset] = iter([subset])
    if "layer" in by_dims:
        blocks = (subset.isel(layer=[i]) for i in range(subset.sizes["layer"]))
    for block in blocks:
        block = block.compute()
        variables = {str(name): block[name].variable for name in block.variables}
        free = {
            dim: block.sizes[dim] for name in read for dim in block[name].dims if dim not in by_dims
        }
        cells: list[Cell] = []
        for index in itertools.product(*(range(block.sizes[dim]) for dim in by_dims)):
            at = dict(zip(by_dims, index))
            key = {dim: block[dim].values[i].item() for dim, i in at.items()}
            flat = {
                name: _flat(name, variable, at, free)
                for name, variable in variables.items()
                if name not in by_dims and set(variable.dims) <= {*at, *free}
            }
            cells += _grouped(flat, by_coordinates, key, selection)
        yield cells


def _numbered(data: xr.Dataset) -> xr.Dataset:
    """Give dims without labels the labels 0, 1, 2, ..."""
    bare = [dim for dim in data.dims if dim not in data.variables]
    return data.assign_coords({dim: np.arange(data.sizes[dim]) for dim in bare})


def _needed(data: xr.Dataset | pd.DataFrame, selection: Selection) -> list[str]:
    known = _names(data)
    wanted = [
        *selection.association.names,
        *selection.by,
        *([selection.cluster] if selection.cluster else []),
        *selection.nested_in,
        *selection.groups,
        *(["position"] if selection.groups else []),
        *[flag for flag in selection.leave_out if flag != "first_position"],
        *(["position", "sequence"] if "first_position" in selection.leave_out else []),
    ]
    return [name for name in dict.fromkeys(wanted) if name in known]


def _flat(name: str, variable: xr.Variable, at: dict, free: dict) -> np.ndarray:
    """One cell's values of a variable, spread over the free dims and made one-dimensional."""
    part = variable.isel({dim: i for dim, i in at.items() if dim in variable.dims})
    return part.set_dims(free).transpose(*free).values.reshape(-1)


def _grouped(
    columns: dict[str, np.ndarray], by: tuple[str, ...], key: dict, selection: Selection
) -> list[Cell]:
    """Split flat columns by the values of `by`, in sorted order."""
    if not by:
        return [_cell(columns, key, selection)]
    frame = pd.DataFrame({name: columns[name] for name in by})
    cells = []
    for values, rows in frame.groupby(list(by), observed=True, sort=True).indices.items():
        values = values if isinstance(values, tuple) else (values,)
        part = {name: column[np.sort(rows)] for name, column in columns.items()}
        cells.append(_cell(part, {**key, **dict(zip(by, values))}, selection))
    return cells


def _cell(flat: dict[str, np.ndarray], key: dict, selection: Selection) -> Cell:
    association = selection.association
    parts = [evaluate(association.response, flat)[0], evaluate(association.predictor, flat)[0]]
    for what, part in zip(("response", "predictor"), parts):
        if part.shape[1] != 1:
            raise ValueError(f"formula: the {what} of {association} is a factor, not one number")
    if association.controls:
        parts.append(evaluate(association.controls, flat)[0])
    table = np.concatenate(parts, axis=1)
    complete = ~np.isnan(table).any(axis=1)
    n = table.shape[0]
    cluster = np.arange(n) if selection.cluster is None else flat[selection.cluster]
    complete &= ~pd.isna(cluster)
    flagged = np.zeros(n, bool)
    for flag in selection.leave_out:
        if flag != "first_position":
            flagged |= flat[flag].astype(bool)
        elif "position" in flat and "sequence" in flat:
            flagged |= flat["position"] == 0
    keep = complete & ~flagged
    apart = [
        flat[name][keep]
        for name in selection.nested_in
        if name not in selection.by and name in flat
    ]
    # groups as integers that are distinct where clusters are
    extra = {
        name: _labels(flat[name][keep], apart).factorize(sort=True)[0] for name in selection.groups
    }
    if selection.groups and "position" in flat:
        extra["position"] = flat["position"][keep]
    return Cell(
        key={name: key[name] for name in selection.by},
        columns=table[keep],
        cluster=_labels(cluster[keep], apart),
        population="|".join(f"{key[name]}" for name in selection.nested_in if name in key),
        extra=extra,
        n_missing=int((~complete).sum()),
        n_left_out=int((complete & flagged).sum()),
    )


def _labels(values: np.ndarray, apart: list[np.ndarray]) -> pd.Index:
    if apart:
        return pd.MultiIndex.from_arrays([*apart, values])
    return pd.Index(values)


def clusters_by_population(
    data: xr.Dataset | pd.DataFrame, selection: Selection
) -> dict[str, pd.Index]:
    """All clusters that any cell of a population uses, sorted: what its resamples draw from."""
    found: dict[str, pd.Index] = {}
    for cells in read_cells(data, selection):
        for cell in cells:
            labels = cell.cluster.unique()
            known = found.get(cell.population)
            found[cell.population] = labels if known is None else known.union(labels, sort=False)
    return {population: labels.sort_values() for population, labels in found.items()}


def coordinates_along(data: xr.Dataset | pd.DataFrame, by: Sequence[str]) -> dict[str, dict]:
    """Other labels of by-dims (a layer's depth, a model's architecture): name -> dim, values."""
    if not isinstance(data, xr.Dataset):
        return {}
    return {
        str(name): {
            "dim": coordinate.dims[0],
            "values": dict(zip(data[coordinate.dims[0]].values.tolist(), coordinate.values)),
        }
        for name, coordinate in data.coords.items()
        if len(coordinate.dims) == 1
        and coordinate.dims[0] in by
        and name not in by
        and coordinate.dims[0] in data.coords
    }
