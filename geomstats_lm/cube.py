"""Where does a study's labelled data live, and which of it is finished?

One Zarr v3 store is one study.  Its leaves are ``/<model key>/<leaf>`` with leaf one of
``activations``, ``decomposition``, ``geometry``, ``perturbation``, and ``/statistics/<name>``.
A leaf is cut into *units*, ``unit = (layer run, token run)``, each a set of whole chunks that one
worker writes with no lock; the ledger ``finished`` beside the data holds the CRC-32 of every
finished unit (0: not yet), so that any step killed at any moment carries on where it stopped.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

LEDGER = "finished"
LEDGER_DIMS = ("layer_run", "token_run")
LEAVES = ("activations", "decomposition", "geometry", "perturbation")
RESERVED = "statistics"
DIM_ORDER = (
    "model", "function_class", "positions", "control", "draw", "layer", "token", "dim",
)  # fmt: skip
STORAGE_DTYPES = ("float32", "float16", "bfloat16")


class IncompleteError(ValueError):
    """A leaf of the study has unfinished chunks; the same command that began it carries on."""


class SettingsError(ValueError):
    """A leaf was made with other settings than the ones now asked for."""


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


def list_leaves(store: str | Path) -> list[str]:
    """Paths ``<group>/<leaf>`` of the leaves in a store, in alphabetical order.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.
    """
    root = _open_group(store)
    return sorted(
        f"{key}/{name}"
        for key, group in root.groups()
        for name, leaf in group.groups()
        if LEDGER in leaf
    )


def has_leaf(store: str | Path, key: str, leaf: str) -> bool:
    """Whether the leaf exists and every unit of it is finished."""
    try:
        group = _open_group(store, f"{key}/{leaf}")
    except FileNotFoundError:
        return False
    return LEDGER in group and bool(np.all(group[LEDGER][...]))


def open_leaf(store: str | Path, key: str, leaf: str) -> xr.Dataset:
    """Open one leaf lazily, its dask chunks the stored chunks, 16-bit floats read as float32.

    Raises
    ------
    FileNotFoundError
        If there is no such leaf.
    IncompleteError
        If some of its units are not finished.
    """
    path = f"{key}/{leaf}"
    group = _open_group(store, path)
    if LEDGER not in group:
        raise IncompleteError(f"{path} in {store} was never set up completely; run its step again")
    finished = group[LEDGER][...] > 0
    if not finished.all():
        raise IncompleteError(
            f"{path} in {store} is incomplete: {int((~finished).sum())} of {finished.size} units "
            "are missing; run the same command again and it carries on"
        )
    dataset = xr.open_zarr(
        str(store), group=path, chunks={}, consolidated=False, drop_variables=[LEDGER]
    )
    # variable-width strings come back as numpy's fixed-width ones, which pandas understands
    text = {
        n: (c.dims, np.asarray(c.values.tolist(), dtype=str), c.attrs)
        for n, c in dataset.coords.items()
        if c.dtype.kind in "TO"
    }
    return dataset.assign_coords(text).map(_as_float32, keep_attrs=True)


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
    from tqdm.auto import tqdm

    grid = _unit_grid(dataset)
    finished = prepare_leaf(
        dataset, store, key, leaf, settings=settings, grid=grid, overwrite=overwrite
    )
    lazy = {name: v for name, v in dataset.data_vars.items() if v.chunks is not None}
    with tqdm(
        total=finished.size, initial=int(finished.sum()), desc=f"{key} {leaf}", unit="chunk",
        disable=not progress, leave=False,
    ) as bar:  # fmt: skip
        for layer_run in range(len(grid["layer"])):
            # One layer at a time: what the units of a layer share (its reference set) is then
            # computed once, and memory is bounded by one layer's work.
            todo = np.flatnonzero(~finished[layer_run])
            writes = []
            for token_run in todo:
                parts, regions = {}, {}
                for name, variable in lazy.items():
                    region = _region(variable, grid, (layer_run, int(token_run)))
                    if region is not None:
                        regions[name], parts[name] = region, variable.data[region]
                writes.append(
                    dask.delayed(write_unit)(
                        str(store), key, leaf, (layer_run, int(token_run)), parts, regions
                    )
                )
            if writes:
                dask.compute(*writes)
            bar.update(len(todo))
    return open_leaf(store, key, leaf)


def prepare_leaf(
    template: xr.Dataset,
    store: str | Path,
    key: str,
    leaf: str,
    *,
    settings: Mapping[str, Any],
    grid: Mapping[str, Sequence[tuple[int, int]]],
    overwrite: bool = False,
    dtypes: Mapping[str, str] | None = None,
) -> np.ndarray:
    """Create a leaf's labels and empty arrays, or find it there, and say which units are done.

    Parameters
    ----------
    template : xarray.Dataset
        Labels in memory, data variables as dask arrays of the final shape and chunks.
    grid : mapping of "layer" and "token" to (start, stop) pairs
        The runs whose products are the units.
    dtypes : mapping of variable to {"float32", "float16", "bfloat16"}, optional
        Storage dtype where it differs from the template's.

    Returns
    -------
    numpy.ndarray of bool, shape (layer runs, token runs)
        True where a unit is finished.

    Raises
    ------
    SettingsError
        If the leaf exists and was made with other settings.
    """
    import zarr

    path = f"{key}/{leaf}"
    shape = (len(grid["layer"]), len(grid["token"]))
    root = zarr.open_group(str(store), mode="a", zarr_format=3)
    if path in root:
        existing = root[path]
        if not overwrite and LEDGER in existing:
            _check_settings(path, dict(existing.attrs), settings)
            return existing[LEDGER][...] > 0
        del root[path]  # asked for, or killed before its ledger was there: nothing is lost
    encoding: dict[str, dict[str, Any]] = {}
    variables = {}
    for name, variable in template.variables.items():
        variable = variable.copy(deep=False)
        if name in template.coords:
            variable = variable.load()  # labels are complete from the start, never lazy
        variable.encoding = {}
        if variable.dtype.kind in "US":  # fixed-width strings have no stable Zarr v3 form
            variable = variable.astype(object)
        stored = (dtypes or {}).get(str(name), str(variable.dtype))
        if variable.chunks is not None:
            encoding[str(name)] = {
                "chunks": tuple(c[0] for c in variable.chunks),
                "compressors": None,  # float activations compress by a tenth and cost 2-4x
            }
        if stored == "bfloat16":
            variable = variable.astype("uint16")
            variable.attrs["storage_dtype"] = "bfloat16"
        elif stored != str(variable.dtype) and variable.chunks is not None:
            variable = variable.astype(stored)
        if variable.dtype.kind == "f":
            variable.encoding["_FillValue"] = np.nan
        variables[name] = variable
    coords = {name: variables.pop(name) for name in template.coords}
    attrs = {**template.attrs, "settings": json.dumps(dict(settings), sort_keys=True)}
    xr.Dataset(variables, coords, attrs).to_zarr(
        str(store), group=path, mode="a", compute=False, consolidated=False, encoding=encoding,
        zarr_format=3,
    )  # fmt: skip
    ledger = root[path].create_array(
        LEDGER, shape=shape, chunks=(1, 1), dtype="uint32", fill_value=0, compressors=None,
        dimension_names=LEDGER_DIMS,
        attributes={"long_name": "CRC-32 of each finished unit, 0 where unfinished"},
    )  # fmt: skip
    lazy = any(v.chunks is not None for v in template.data_vars.values())
    if not lazy:
        ledger[...] = 1
    return np.full(shape, not lazy)


def write_unit(
    store: str,
    key: str,
    leaf: str,
    unit: tuple[int, int],
    parts: Mapping[str, np.ndarray],
    regions: Mapping[str, tuple[slice, ...]],
) -> None:
    """Write one unit's whole chunks, then tick it off in the ledger.

    Raises
    ------
    OverflowError
        If a finite value does not fit the storage dtype; nothing of the unit is written.
    """
    import zarr

    group = zarr.open_group(store, path=f"{key}/{leaf}", mode="r+")
    encoded = {name: _encode(name, np.asarray(parts[name]), group[name]) for name in parts}
    checksum = 0
    for name in sorted(encoded):
        group[name][regions[name]] = encoded[name]
        checksum = zlib.crc32(np.ascontiguousarray(encoded[name]).view(np.uint8), checksum)
    group[LEDGER][unit] = checksum or 1


def token_runs(n_tokens: int, run: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive runs of ``run`` tokens, the last one possibly shorter."""
    return [(i, min(i + run, n_tokens)) for i in range(0, n_tokens, run)]


def _open_group(store: str | Path, path: str | None = None) -> Any:
    import zarr

    try:
        return zarr.open_group(str(store), path=path, mode="r")
    except FileNotFoundError:
        place = f"{store}/{path}" if path else str(store)
        raise FileNotFoundError(f"no study data at {place}") from None


def _unit_grid(dataset: xr.Dataset) -> dict[str, list[tuple[int, int]]]:
    """The runs along layer and token that the dask chunks of a Dataset spell out."""
    grid = {"layer": [(0, 1)], "token": [(0, 1)]}
    for dim in grid:
        chunkings = {
            v.variable.chunksizes[dim]
            for v in dataset.data_vars.values()
            if v.chunks is not None and dim in v.dims
        }
        if len(chunkings) > 1:
            raise ValueError(f"variables disagree in their chunks along {dim!r}: {chunkings}")
        for sizes in chunkings:
            stops = np.cumsum(sizes)
            grid[dim] = [(int(b - s), int(b)) for s, b in zip(sizes, stops)]
    return grid


def _region(
    variable: xr.DataArray, grid: Mapping[str, Sequence[tuple[int, int]]], unit: tuple[int, int]
) -> tuple[slice, ...] | None:
    """The part of a variable that a unit holds; None where an earlier unit holds it already."""
    runs = dict(zip(("layer", "token"), unit))
    if any(run and dim not in variable.dims for dim, run in runs.items()):
        return None
    return tuple(
        slice(*grid[str(dim)][runs[str(dim)]]) if dim in runs else slice(None)
        for dim in variable.dims
    )


def _check_settings(path: str, attrs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    before = json.loads(attrs.get("settings", "{}"))
    now = json.loads(json.dumps(dict(settings)))
    differing = [
        f"{name}: stored {before.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise SettingsError(
            f"{path} was made with other settings ({'; '.join(differing)}); "
            "pass overwrite=True to replace it, or use another store"
        )


def _encode(name: str, values: np.ndarray, array: Any) -> np.ndarray:
    """Values in the storage dtype; a finite value that overflows there is an error."""
    stored = array.attrs.get("storage_dtype", str(array.dtype))
    if stored not in ("float16", "bfloat16"):
        return values.astype(array.dtype, copy=False)
    if stored == "float16":
        with np.errstate(over="ignore"):
            encoded = values.astype(np.float16)
        overflow = int(np.sum(~np.isfinite(encoded) & np.isfinite(values)))
    else:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        # round to nearest even on the upper 16 bits; NaN keeps its quiet bit
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        encoded = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
        overflow = int(np.sum(((encoded & 0x7FFF) == 0x7F80) & np.isfinite(values)))
    if overflow:
        raise OverflowError(
            f"{overflow} values of {name!r} overflow {stored} (largest |value| "
            f"{np.nanmax(np.abs(values)):.4g}); store as "
            f"{'bfloat16 or float32' if stored == 'float16' else 'float32'}"
        )
    return encoded


def _as_float32(variable: xr.DataArray) -> xr.DataArray:
    if variable.attrs.get("storage_dtype") == "bfloat16":
        widen = lambda a: (a.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
        decoded = xr.apply_ufunc(
            widen, variable, dask="parallelized", output_dtypes=[np.float32], keep_attrs=True
        )
        return decoded.assign_attrs(storage_dtype="bfloat16")
    return variable.astype(np.float32) if variable.dtype == np.float16 else variable


def ordered(dims: Iterable[str]) -> tuple[str, ...]:
    """Dims in the order that every variable of a study keeps."""
    present = set(dims)
    return tuple(d for d in DIM_ORDER if d in present)
