"""Where does a study's labelled data live, and which of it is finished?

One Zarr v3 store is one study.  Its leaves are ``/<model key>/<leaf>`` with leaf one of
``activations``, ``decomposition``, ``geometry``, ``perturbation``, and ``/statistics/<name>``.
A leaf is cut into *units*, ``unit = (layer run, token run)``, each a set of whole chunks that one
worker writes with no lock; the ledger ``finished`` beside the data holds the CRC-32C of every
finished unit (0: not yet), so that any step killed at any moment carries on where it stopped.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm.chunk_files import lazy_chunks
from geomstats_lm.encoding import STORAGE_DTYPES, from_bfloat16
from geomstats_lm.ledger import (
    Grid,
    SettingsError,
    finish_leaf,
    prepare_leaf,
    token_runs,
    unit_grid,
    unit_region,
    write_unit,
)
from geomstats_lm.storage import (
    LEDGER,
    IncompleteError,
    list_leaves,
    missing_chunks,
    open_group,
    unfinished_units,
)

__all__ = [
    "DIM_ORDER",
    "LEAVES",
    "LEDGER",
    "RESERVED",
    "STORAGE_DTYPES",
    "IncompleteError",
    "SettingsError",
    "finish_leaf",
    "has_leaf",
    "list_leaves",
    "model_key",
    "open_cube",
    "open_leaf",
    "open_study",
    "ordered",
    "prepare_leaf",
    "progress_bar",
    "settings_of",
    "token_runs",
    "write_leaf",
    "write_unit",
]

LEAVES = ("activations", "parts", "decomposition", "subspace", "geometry", "perturbation")
RESERVED = "statistics"
DIM_ORDER = (
    "model", "function_class", "replacement", "positions", "control", "draw", "layer", "token",
    "dim",
)  # fmt: skip


def model_key(name: str) -> str:
    """Slug under which a model's group is stored.

    Parameters
    ----------
    name : str
        Name or path of a model.

    Returns
    -------
    str
        Lower-case letters, digits, ``.``, ``_`` and ``-``.

    Raises
    ------
    ValueError
        If nothing is left of the name, or the slug is the reserved ``statistics``.

    Examples
    --------
    >>> model_key("EleutherAI/pythia-70m")
    'eleutherai-pythia-70m'
    """
    key = re.sub(r"[^a-z0-9._-]+", "-", str(name).lower()).strip("-._")
    if not key or key == RESERVED:
        raise ValueError(f"model name {name!r} gives the key {key!r}, which cannot name a group")
    return key


def open_study(store: str | Path, *, incomplete: str = "error") -> xr.DataTree:
    """Open a study lazily as a tree ``/<model>/<leaf>``.

    Parameters
    ----------
    store : str or Path
        Folder or fsspec URL of the Zarr store.
    incomplete : {"error", "skip"}
        What to do with a leaf whose ledger shows unfinished chunks.

    Returns
    -------
    xarray.DataTree
        ``open_study(store)[model]`` is the node that the verbs take.  Nothing is loaded.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.
    IncompleteError
        If a leaf has unfinished chunks and ``incomplete="error"``.

    Examples
    --------
    >>> import tempfile, xarray as xr
    >>> store = tempfile.mkdtemp() + "/study.zarr"
    >>> data = xr.Dataset({"loss": (("model", "token"), [[1.0, 2.0]])}, {"model": ["tiny"]})
    >>> _ = write_leaf(data, store, "tiny", "activations", settings={}, progress=False)
    >>> float(open_study(store)["tiny/activations"].loss.mean())
    1.5
    """
    if incomplete not in ("error", "skip"):
        raise ValueError(f"incomplete={incomplete!r}: accepted are 'error' and 'skip'")
    leaves = {}
    for path in list_leaves(store):
        try:
            leaves[f"/{path}"] = open_leaf(store, *path.split("/", 1))
        except IncompleteError:
            if incomplete == "error":
                raise
    return xr.DataTree.from_dict(leaves)


def open_node(store: str | Path, key: str) -> xr.DataTree:
    """A model's node with those of its leaves that are finished, as the verbs take it.

    Raises
    ------
    KeyError
        If the study holds nothing finished of that model.
    """
    tree = open_study(store, incomplete="skip")
    if key not in tree.children:
        raise KeyError(f"model {key!r} is not in {store}; there are {list(tree.children)}")
    return tree.children[key]


def open_cube(
    store: str | Path, *, models: Sequence[str] | None = None, variable: str = "hidden"
) -> xr.DataArray:
    """Open the activations of several models as one (model, layer, token, dim) array.

    Parameters
    ----------
    store : str or Path
        Folder or fsspec URL of the Zarr store.
    models : sequence of str, optional
        Model keys; all models of the study by default.
    variable : str
        Variable of the ``activations`` leaf.

    Returns
    -------
    xarray.DataArray
        Lazy; padded with NaN only where models differ in layers, tokens or dims.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.
    KeyError
        If a model or the variable is not in it.

    Examples
    --------
    >>> import tempfile, xarray as xr, numpy as np
    >>> store = tempfile.mkdtemp() + "/study.zarr"
    >>> data = xr.Dataset(
    ...     {"hidden": (("model", "layer", "token", "dim"), np.ones((1, 2, 4, 3)))},
    ...     {"model": ["tiny"]},
    ... )
    >>> _ = write_leaf(data, store, "tiny", "activations", settings={}, progress=False)
    >>> open_cube(store).dims
    ('model', 'layer', 'token', 'dim')
    """
    known = [p.split("/")[0] for p in list_leaves(store) if p.endswith("/activations")]
    chosen = list(models) if models is not None else known
    unknown = [m for m in chosen if m not in known]
    if unknown or not chosen:
        raise KeyError(f"models {unknown or chosen} have no activations here; there are {known}")
    cubes = []
    for key in chosen:
        leaf = open_leaf(store, key, "activations")
        if variable not in leaf:
            raise KeyError(f"variable {variable!r} is not in {key}; there are {list(leaf)}")
        cube = leaf[variable]
        # Token labels belong to one model's tokenizer, so they do not survive side by side.
        cubes.append(cube.drop_vars([c for c in cube.coords if c not in cube.dims]))
    return xr.concat(cubes, dim="model", join="outer", combine_attrs="drop_conflicts")


def has_leaf(store: str | Path, key: str, leaf: str) -> bool:
    """Whether the leaf exists and every unit of it is finished."""
    try:
        return (
            LEDGER in open_group(store, f"{key}/{leaf}")
            and not unfinished_units(store, f"{key}/{leaf}")[0]
        )
    except FileNotFoundError:
        return False


def open_leaf(store: str | Path, key: str, leaf: str, *, incomplete: str = "error") -> xr.Dataset:
    """Open one leaf lazily, its dask chunks the stored chunks, 16-bit floats read as float32.

    Parameters
    ----------
    store, key, leaf : str
        The leaf ``/<key>/<leaf>``.
    incomplete : {"error", "ignore"}
        Whether chunks that are not there are an error, or read as NaN.

    Returns
    -------
    xarray.Dataset

    Raises
    ------
    FileNotFoundError
        If there is no such leaf.
    IncompleteError
        If some of its units are not finished.
    """
    if incomplete not in ("error", "ignore"):
        raise ValueError(f"incomplete={incomplete!r}: accepted are 'error' and 'ignore'")
    path = f"{key}/{leaf}"
    group = open_group(store, path)
    if LEDGER not in group:
        raise IncompleteError(f"{path} in {store} was never set up completely; run its step again")
    if incomplete == "error":
        _check_complete(store, path)
    dataset = xr.open_zarr(
        str(store), group=path, chunks={}, consolidated=False, drop_variables=[LEDGER]
    )
    if incomplete == "error":
        for name, variable in dataset.data_vars.items():
            chunks = lazy_chunks(group[name])
            if chunks is not None:
                dataset[name] = variable.copy(data=chunks)
    # Labels are read at once: they are a thousandth of the data, and xarray needs them to select.
    # Variable-width strings become numpy's fixed-width ones, which pandas understands.
    labels = {
        n: (
            c.dims,
            np.asarray(c.values.tolist(), str) if c.dtype.kind in "TO" else c.values,
            c.attrs,
        )
        for n, c in dataset.coords.items()
    }
    return dataset.assign_coords(labels).map(_as_float32, keep_attrs=True)


def _check_complete(store: str | Path, path: str) -> None:
    missing, units = unfinished_units(store, path)
    if missing:
        raise IncompleteError(
            f"{path} in {store} is incomplete: {missing} of {units} units are missing; run the "
            "same command again and it carries on"
        )
    lost = missing_chunks(store, path)
    if lost:
        raise IncompleteError(
            f"{path} in {store} has lost chunks that were finished ({lost}); copy the store again, "
            "or run the step that made it with overwrite=True"
        )


def settings_of(dataset: xr.Dataset) -> dict[str, Any]:
    """Settings recorded in a leaf's attributes when it was made."""
    return json.loads(dataset.attrs.get("settings", "{}"))


def write_leaf(
    dataset: xr.Dataset,
    store: str | Path,
    key: str,
    leaf: str,
    *,
    settings: Mapping[str, Any],
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Compute a lazy Dataset chunk by chunk into the study, resuming what is unfinished.

    Parameters
    ----------
    dataset : xarray.Dataset
        Dask-backed variables are written unit by unit on whatever scheduler dask has; the dask
        chunks along ``layer`` and ``token`` become the stored ones.  Others are written at once.
    store, key, leaf : str
        Where it goes.
    settings : mapping
        What made it; a second call with other settings is refused.
    overwrite : bool
        Remove the leaf first.
    progress : bool
        Show a progress bar.

    Returns
    -------
    xarray.Dataset
        The stored leaf, opened lazily.

    Raises
    ------
    SettingsError
        If the leaf exists and was made with other settings.
    """
    import dask

    since, grid = time.time(), unit_grid(dataset)
    finished = prepare_leaf(
        dataset, store, key, leaf, settings=settings, grid=grid, overwrite=overwrite
    )
    lazy = {name: v for name, v in dataset.data_vars.items() if v.chunks is not None}
    sizes = _unit_bytes(lazy, grid)
    with progress_bar(
        progress, int(sizes.sum()), f"{key} {leaf}", unit="B", initial=int(sizes[finished].sum())
    ) as bar:
        for layer_run in range(len(grid["layer"])):
            # One layer at a time: what the units of a layer share (its reference set) is then
            # computed once, and memory is bounded by one layer's work.
            todo = np.flatnonzero(~finished[layer_run])
            writes = []
            for token_run in todo:
                unit = (layer_run, int(token_run))
                parts, regions = {}, {}
                for name, variable in lazy.items():
                    region = unit_region(variable.dims, grid, unit)
                    if region is not None:
                        regions[name], parts[name] = region, variable.data[region]
                writes.append(dask.delayed(write_unit)(str(store), key, leaf, unit, parts, regions))
            if writes:
                dask.compute(*writes)
            bar.update(int(sizes[layer_run][todo].sum()))
    finish_leaf(store, key, leaf, since=since)
    return open_leaf(store, key, leaf)


def progress_bar(
    show: bool, total: int, description: str, *, unit: str = "token", initial: int = 0
) -> Any:
    """A bar with amount done, rate and time left on a terminal or in a notebook, else silence."""
    from tqdm.auto import tqdm

    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        total=total, initial=initial, desc=description, unit=unit, unit_scale=True, leave=False,
        disable=not (show and watched),
    )  # fmt: skip


def _unit_bytes(lazy: Mapping[Any, xr.DataArray], grid: Grid) -> np.ndarray:
    """Bytes that each unit holds, shape (layer runs, token runs)."""
    sizes = np.zeros((len(grid["layer"]), len(grid["token"])), dtype=np.int64)
    for variable in lazy.values():
        if not variable.size:
            continue
        runs = [
            np.array([b - a for a, b in grid[dim]]) / variable.sizes[dim]
            if dim in variable.dims
            else np.arange(len(grid[dim])) == 0
            for dim in ("layer", "token")
        ]
        sizes += np.rint(variable.nbytes * np.multiply.outer(*runs)).astype(np.int64)
    return sizes


def _as_float32(variable: xr.DataArray) -> xr.DataArray:
    if variable.attrs.get("storage_dtype") == "bfloat16":
        return xr.apply_ufunc(
            from_bfloat16, variable, dask="parallelized", output_dtypes=[np.float32],
            keep_attrs=True,
        )  # fmt: skip
    return variable.astype(np.float32) if variable.dtype == np.float16 else variable


def ordered(dims: Iterable[str]) -> tuple[str, ...]:
    """Dims in the order that every variable of a study keeps."""
    present = set(dims)
    return tuple(d for d in DIM_ORDER if d in present)
