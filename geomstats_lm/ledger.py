"""Which units of a leaf are finished, and how does one more become so?

A leaf's chunks are cut into units, ``unit = (layer run, token run)``, that one writer fills with
no lock: first the unit's whole chunks, then the unit's CRC-32C in the ledger (0 or absent: not
yet).  Whatever moment a writer is killed at, a unit is ticked off and whole, or written again.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm.chunk_files import write_chunks
from geomstats_lm.encoding import BFLOAT16_NAN, STORAGE_DTYPES, checksum, encode
from geomstats_lm.storage import (
    EMPTY_GROUP,
    LEDGER,
    delete_file,
    delete_folder,
    exists,
    list_keys,
    open_group,
    open_zarr_store,
    publish,
    read_json,
    unfinished_units,
    write_file,
    write_json,
)

LEDGER_DIMS = ("layer_run", "token_run")
LABEL_CHUNK = 1 << 20  # tokens to a chunk of a coordinate
GRACE_SECONDS = 2.0  # how long another writer's half-made leaf gets before it counts as abandoned

Grid = Mapping[str, Sequence[tuple[int, int]]]


class SettingsError(ValueError):
    """A leaf was made with other settings than the ones now asked for."""


def prepare_leaf(
    template: xr.Dataset,
    store: str | Path,
    key: str,
    leaf: str,
    *,
    settings: Mapping[str, Any],
    grid: Grid,
    overwrite: bool = False,
    dtypes: Mapping[str, str] | None = None,
) -> np.ndarray:
    """Create a leaf's labels and empty arrays, or find it there, and say which units are done.

    Any number of processes may call this at once: the first to create the leaf's group file with
    its settings wins, the others check their settings against it, and all of them write the same
    labels, so that nobody waits for anybody.

    Parameters
    ----------
    template : xarray.Dataset
        Labels in memory, data variables as dask arrays of the final shape and chunks.
    store, key, leaf : str
        Where it goes.
    settings : mapping
        What makes it; a second call with other settings is refused.
    grid : mapping of "layer" and "token" to (start, stop) pairs
        The runs whose products are the units.
    overwrite : bool
        Remove the leaf first.
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
    ValueError
        If the units of the grid are not whole chunks of the template.

    Examples
    --------
    >>> import dask.array as da
    >>> template = xr.Dataset(
    ...     {"loss": (("model", "token"), da.zeros((1, 8), chunks=(1, 4)))}, {"model": ["tiny"]}
    ... )
    >>> grid = {"layer": [(0, 1)], "token": token_runs(8, 4)}
    >>> prepare_leaf(template, "memory://prepared", "tiny", "activations", settings={}, grid=grid)
    array([[False, False]])
    """
    _check_grid(template, grid)
    _check_dtypes(template, dtypes or {})
    path = f"{key}/{leaf}"
    files = _leaf_files(template, settings, grid, dtypes or {})
    ledger_file, group_file = f"{LEDGER}/zarr.json", "zarr.json"
    zarr_store = open_zarr_store(store)
    for parent in (group_file, f"{key}/{group_file}"):
        write_json(zarr_store, parent, EMPTY_GROUP, if_absent=True)
    if overwrite:
        remove_leaf(store, key, leaf)
    elif not exists(zarr_store, f"{path}/{ledger_file}"):
        _drop_abandoned(store, key, leaf, settings)
    write_file(zarr_store, f"{path}/{group_file}", files.pop(group_file), if_absent=True)
    _check_settings(path, read_json(zarr_store, f"{path}/{group_file}")["attributes"], settings)
    if not exists(zarr_store, f"{path}/{ledger_file}"):
        last = files.pop(ledger_file)
        for name, value in files.items():
            write_file(zarr_store, f"{path}/{name}", value)
        write_file(zarr_store, f"{path}/{ledger_file}", last)
    found = open_group(store, path, mode="r")[LEDGER]
    expected = (len(grid["layer"]), len(grid["token"]))
    if found.shape != expected:
        raise SettingsError(
            f"{path} is cut into {found.shape} units, now {expected}; "
            "pass overwrite=True to replace it, or use another store"
        )
    return np.asarray(found[...]) > 0


def write_unit(
    store: str | Path,
    key: str,
    leaf: str,
    unit: tuple[int, int],
    parts: Mapping[str, np.ndarray],
    regions: Mapping[str, tuple[slice, ...]],
) -> None:
    """Write one unit's whole chunks, then tick it off in the ledger.

    Parameters
    ----------
    store, key, leaf : str
        A leaf that :func:`prepare_leaf` has set up.
    unit : (int, int)
        Layer run and token run.
    parts, regions : mapping of variable to values, and to where they go
        Regions are whole chunks.

    Raises
    ------
    OverflowError
        If a finite value does not fit the storage dtype; nothing of the unit is written.
    """
    arrays = _arrays_of(store, f"{key}/{leaf}")
    encoded = {}
    for name, values in parts.items():
        layers = functools.partial(_layers_of, arrays, name, regions[name])
        encoded[name] = encode(np.asarray(values), arrays[name], layers)
    for name, values in encoded.items():
        write_chunks(arrays[name], regions[name], values)
    tick = np.array([[checksum(encoded)]], dtype=np.uint32)
    write_chunks(arrays[LEDGER], tuple(slice(i, i + 1) for i in unit), tick)


def finish_leaf(store: str | Path, key: str, leaf: str, *, since: float) -> bool:
    """Publish a leaf if all its units are finished.

    Parameters
    ----------
    store, key, leaf : str
        The leaf.
    since : float
        Time (``time.time()``) at which this writer began; half-written files from before are what
        killed writers left.

    Returns
    -------
    bool
        Whether it is finished.
    """
    path = f"{key}/{leaf}"
    if unfinished_units(store, path)[0]:
        return False
    if "://" not in str(store):
        for half in Path(store, path).rglob("*.partial"):
            if half.stat().st_mtime < since:
                half.unlink(missing_ok=True)
    publish(store)
    return True


def remove_leaf(store: str | Path, key: str, leaf: str) -> None:
    """Remove a leaf, in an order that is safe to be killed in: first nothing counts as finished."""
    zarr_store, path = open_zarr_store(store), f"{key}/{leaf}"
    keys = list_keys(zarr_store, path)
    ticks = [k for k in keys if k.startswith(f"{LEDGER}/c/")]
    rest = [k for k in keys if k not in {*ticks, f"{LEDGER}/zarr.json", "zarr.json"}]
    for name in ticks:
        delete_file(zarr_store, f"{path}/{name}")
    publish(store)
    delete_file(zarr_store, f"{path}/{LEDGER}/zarr.json")
    for name in sorted({k.split("/")[0] for k in (*rest, LEDGER)}):
        delete_folder(zarr_store, f"{path}/{name}")
    delete_file(zarr_store, f"{path}/zarr.json")
    delete_folder(zarr_store, path)


def token_runs(n_tokens: int, run: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive runs of ``run`` tokens, the last one possibly shorter."""
    return [(i, min(i + run, n_tokens)) for i in range(0, n_tokens, run)]


def unit_region(dims: Iterable[Any], grid: Grid, unit: tuple[int, int]) -> tuple[slice, ...] | None:
    """The part of a variable that a unit holds; None where an earlier unit holds it already."""
    names = [str(d) for d in dims]
    runs = dict(zip(("layer", "token"), unit))
    if any(run and dim not in names for dim, run in runs.items()):
        return None
    return tuple(slice(*grid[d][runs[d]]) if d in runs else slice(None) for d in names)


def unit_grid(dataset: xr.Dataset) -> dict[str, list[tuple[int, int]]]:
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


def _check_grid(template: xr.Dataset, grid: Grid) -> None:
    for name, variable in template.data_vars.items():
        if variable.chunks is None:
            continue
        for dim, sizes in variable.variable.chunksizes.items():
            if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
                raise ValueError(
                    f"variable {name!r} has chunks {sizes} along {dim!r}; stored chunks are all of "
                    "one size but a shorter last one, so rechunk it"
                )
            if dim not in grid:
                continue
            edges = {0, *np.cumsum(sizes).tolist()}
            torn = [run for run in grid[str(dim)] if not edges >= set(run)]
            if torn or grid[str(dim)][-1][1] != sum(sizes):
                raise ValueError(
                    f"grid: the {dim} runs {torn or list(grid[str(dim)])} are not whole chunks of "
                    f"{name!r}, whose chunks are {sizes}"
                )


def _check_dtypes(template: xr.Dataset, dtypes: Mapping[str, str]) -> None:
    for name, dtype in dtypes.items():
        if name not in template.data_vars:
            raise ValueError(f"dtypes names {name!r}; there are {list(template.data_vars)}")
        if dtype not in STORAGE_DTYPES:
            raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(STORAGE_DTYPES)}")


def _leaf_files(
    template: xr.Dataset, settings: Mapping[str, Any], grid: Grid, dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """Every file of a leaf before its first unit, by name: the same for the same template."""
    import dask.array as da
    import zarr
    from zarr.storage import MemoryStore

    encoding: dict[str, dict[str, Any]] = {}
    variables = {}
    for name, variable in template.variables.items():
        variable = variable.copy(deep=False)
        if name in template.coords:
            variable = variable.load()  # labels are complete from the start, never lazy
        variable.encoding, variable.attrs = {}, dict(variable.attrs)
        if variable.dtype.kind in "US":  # fixed-width strings have no stable Zarr v3 form
            variable = variable.astype(object)
        chunks = variable.chunks
        stored = dtypes.get(str(name), str(variable.dtype))
        if stored == "bfloat16":
            variable.attrs["storage_dtype"] = "bfloat16"
        dtype = np.dtype("uint16" if stored == "bfloat16" else stored)
        if chunks is not None:  # only the shape matters here, so a graph of one chunk will do
            empty = da.zeros(variable.shape, chunks=-1, dtype=dtype)
            variable = xr.Variable(variable.dims, empty, variable.attrs)
        how: dict[str, Any] = {}
        if chunks is not None:  # activations compress by a tenth, and that costs 2-4x in speed
            how = {"chunks": tuple(c[0] for c in chunks), "compressors": None}
        elif variable.ndim:
            how = {"chunks": tuple(max(1, min(n, LABEL_CHUNK)) for n in variable.shape)}
        if stored == "bfloat16":
            how["fill_value"] = BFLOAT16_NAN
        elif variable.dtype.kind == "f":
            # The fill of a chunk that is not there. As a _FillValue it would make every reader
            # compare every value with it.
            how |= {"fill_value": np.nan, "_FillValue": None}
        variables[name], encoding[str(name)] = variable, how
    coords = {name: variables.pop(name) for name in template.coords}
    attrs = {**template.attrs, "settings": json.dumps(_plain(settings), sort_keys=True)}
    memory = MemoryStore()
    # not by zarr's configuration, which is that of all threads
    xr.Dataset(variables, coords, attrs).to_zarr(
        memory, mode="w", compute=False, consolidated=False, encoding=encoding, zarr_format=3,
        write_empty_chunks=True,
    )  # fmt: skip
    group: Any = zarr.open_group(memory, mode="a", zarr_format=3)
    whole = all(v.chunks is None for v in template.data_vars.values())
    spans = {
        f"unit_{d}s": int(template.sizes.get(d, 1) if whole else grid[d][0][1] - grid[d][0][0])
        for d in ("layer", "token")
    }
    ledger = group.create_array(
        LEDGER, shape=(len(grid["layer"]), len(grid["token"])), chunks=(1, 1), dtype="uint32",
        fill_value=0, compressors=None, dimension_names=LEDGER_DIMS,
        attributes={"long_name": "CRC-32C of each finished unit, 0 where unfinished", **spans},
    )  # fmt: skip
    if whole:
        crc = checksum({str(name): np.asarray(group[str(name)][...]) for name in variables})
        ledger[...] = np.full(ledger.shape, crc, dtype=np.uint32)
    return dict(memory._store_dict)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(settings)))


def _check_settings(path: str, attrs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    before, now = json.loads(attrs.get("settings", "{}")), _plain(settings)
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


def _drop_abandoned(store: str | Path, key: str, leaf: str, settings: Mapping[str, Any]) -> None:
    """Remove what a writer with other settings began and left before it held anything."""
    zarr_store, path = open_zarr_store(store), f"{key}/{leaf}"
    until = time.monotonic() + GRACE_SECONDS
    while exists(zarr_store, f"{path}/zarr.json"):
        try:
            attrs = read_json(zarr_store, f"{path}/zarr.json").get("attributes", {})
            _check_settings(path, attrs, settings)
            return  # the same leaf half made: whoever comes first completes it
        except SettingsError:
            if exists(zarr_store, f"{path}/{LEDGER}/zarr.json"):
                raise
            if time.monotonic() > until:
                remove_leaf(store, key, leaf)
        time.sleep(GRACE_SECONDS / 20)


def _layers_of(arrays: Mapping[str, Any], name: str, region: tuple[slice, ...]) -> list[int]:
    """Layer numbers of a region of a variable; none where it has no layers."""
    dims = arrays[name].metadata.dimension_names or ()
    if "layer" not in dims or "layer" not in arrays:
        return []
    return np.atleast_1d(arrays["layer"][region[dims.index("layer")]]).tolist()


def _arrays_of(store: str | Path, path: str) -> dict[str, Any]:
    """The arrays of a leaf, opened once for as long as its group file stays the same."""
    if "://" in str(store):
        return dict(open_group(store, path, mode="r+").arrays())
    try:
        made = os.stat(Path(store, path, "zarr.json"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no study data at {store}/{path}") from None
    return _opened(str(store), path, made.st_mtime_ns, made.st_ino)


@functools.lru_cache(maxsize=16)
def _opened(store: str, path: str, changed: int, inode: int) -> dict[str, Any]:
    return dict(open_group(store, path, mode="r+").arrays())
