"""How do states that someone else has dumped become a labelled cube?

``hidden[l, token] = dump[l][order[token]]``, order putting reference documents first; the labels
come as a table with a row a token, and nothing of the dump is held but the run being copied.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.cube import (
    STORAGE_DTYPES,
    finish_leaf,
    model_key,
    open_leaf,
    prepare_leaf,
    progress_bar,
    token_runs,
    write_unit,
)
from geomstats_lm.dumps import FLOATS, Layer, contiguous, open_dump
from geomstats_lm.selection import tokens_per_chunk

INTEGER_LABELS = {
    "document": np.int32, "sequence": np.int32, "position": np.int32, "token_id": np.int32,
    "char_start": np.int32, "char_end": np.int32, "split": np.int8,
}  # fmt: skip


def import_activations(
    source: str | Path | Sequence[str | Path],
    labels: pd.DataFrame | str | Path,
    store: str | Path,
    *,
    model: str,
    array: str | None = None,
    layers: Sequence[int] | None = None,
    n_layers: int | None = None,
    evaluation_share: float = 1 / 3,
    seed: int = 0,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Build a labelled cube from files of states, streaming.

    Parameters
    ----------
    source : str, Path or sequence of them
        ``.npy``, ``.npz``, ``.safetensors``, torch (``.pt``, ``.pth``) file or plain Zarr array of
        shape (layer, token, dim); such a file with one array (token, dim) a layer; a folder with
        one file a layer, the last number in a name being its layer; or those files in order.
    labels : pandas.DataFrame or path of a CSV file
        One row a token, in the order of the dump.  Column ``document`` is needed.  Known are
        ``sequence`` (each document by default), ``position`` (counted within the sequence by
        default), ``token_id``, ``char_start``, ``char_end`` (-1 by default), ``split`` (0
        reference, 1 evaluation; drawn by document by default), ``is_special`` (False by default)
        and ``loss``; further columns of numbers become coordinates as they are.
    store : str or Path
        Study to write to.
    model : str
        Name of the model that the states are of.
    array : str, optional
        Which array of files that hold several.
    layers : sequence of int, optional
        Layer numbers, 0 being the input of the first block; by default those in the names, else
        0, 1, 2, ...
    n_layers : int, optional
        How many blocks the model has, for ``depth``; the largest layer number by default.
    evaluation_share, seed
        Share of documents that goes to evaluation where ``labels`` has no ``split``.
    dtype : {"float32", "float16", "bfloat16"}
        Storage dtype.
    overwrite : bool
        Replace activations that were made otherwise.
    progress : bool
        Show a progress bar on a terminal.

    Returns
    -------
    xarray.Dataset
        The ``activations`` leaf, tokens of reference documents first.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        If shapes, dtypes or labels disagree: the file is named.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "states.npy", np.random.default_rng(0).normal(size=(3, 40, 8)))
    >>> labels = pd.DataFrame({"document": np.repeat(np.arange(10), 4)})
    >>> cube = import_activations(
    ...     folder / "states.npy", labels, folder / "study.zarr", model="org/theirs", progress=False
    ... )
    >>> cube.hidden.shape, cube.attrs["n_layers"]
    ((1, 3, 40, 8), 2)
    """
    if dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(STORAGE_DTYPES)}")
    since = time.time()
    table = _complete(_read_table(labels), evaluation_share, seed)
    order = np.argsort(table["split"].to_numpy(), kind="stable")
    with ExitStack() as stack:
        dump = open_dump(source, array, stack)
        _check_dump(dump, len(table))
        numbers = _layer_numbers(dump, layers, n_layers)
        key, depth = model_key(model), numbers[-1] if n_layers is None else int(n_layers)
        template = _template(table.iloc[order], numbers, depth, dump[0].shape[1], key)
        template.attrs.update(model_name=model, model_key=key, n_layers=depth)
        columns = np.ascontiguousarray(table.to_numpy(dtype=np.float64))
        settings = {
            "dtype": dtype,
            "files": [Path(layer.place).name for layer in dump],
            "labels": f"{zlib.crc32(columns.data):08x}",
            "layers": numbers,
            "shape": [len(dump), *dump[0].shape],
        }
        n_tokens, run = len(table), template.hidden.variable.chunksizes["token"][0]
        grid = {
            "layer": [(i, i + 1) for i in range(len(numbers))], "token": token_runs(n_tokens, run),
        }  # fmt: skip
        finished = prepare_leaf(
            template, store, key, "activations", settings=settings, grid=grid,
            overwrite=overwrite, dtypes={"hidden": dtype},
        )  # fmt: skip
        loss = table["loss"].to_numpy(np.float32)[order] if "loss" in table else None
        token_bytes = dump[0].shape[1] * 4
        with progress_bar(
            progress, len(dump) * n_tokens * token_bytes, f"{key} import", unit="B"
        ) as bar:
            for place, layer in enumerate(dump):
                for number, (start, stop) in enumerate(grid["token"]):
                    if not finished[place, number]:
                        values = _read(layer, order[start:stop], numbers[place])
                        _write(str(store), key, (place, number), values, start, stop, loss)
                    bar.update((stop - start) * token_bytes)
    finish_leaf(store, key, "activations", since=since)
    return open_leaf(store, key, "activations")


def _read_table(labels: pd.DataFrame | str | Path) -> pd.DataFrame:
    if isinstance(labels, pd.DataFrame):
        return labels
    path = Path(labels)
    if not path.exists():
        raise FileNotFoundError(f"labels: there is no file {path}")
    return pd.read_csv(path)


def _complete(table: pd.DataFrame, evaluation_share: float, seed: int) -> pd.DataFrame:
    """Labels with every column that a cube has, in its dtypes."""
    if "document" not in table:
        raise ValueError(f"labels: column 'document' is needed, given are {list(table)}")
    table = table.reset_index(drop=True)
    wrong = [c for c in table if table[c].dtype.kind not in "iufb" or table[c].isna().any()]
    wrong = [c for c in wrong if c != "loss"]
    if wrong:
        raise ValueError(
            f"labels: columns {wrong} hold text or missing values; labels are whole numbers, and "
            "texts are looked up by them"
        )
    if "sequence" not in table:
        table["sequence"] = (table["document"] != table["document"].shift()).cumsum() - 1
    if "position" not in table:
        table["position"] = table.groupby("sequence").cumcount()
    for name in ("token_id", "char_start", "char_end"):
        if name not in table:
            table[name] = -1
    if "is_special" not in table:
        table["is_special"] = False
    if "split" not in table:
        documents = table["document"].unique()
        n_evaluation = round(len(documents) * evaluation_share)
        drawn = np.random.default_rng(seed).permutation(documents)[:n_evaluation]
        table["split"] = table["document"].isin(drawn)
    if not table["split"].isin((0, 1)).all():
        raise ValueError("labels: split is 0 for reference and 1 for evaluation, nothing else")
    return table.astype({**INTEGER_LABELS, "is_special": bool})


def _check_dump(dump: list[Layer], n_tokens: int) -> None:
    first = dump[0]
    for layer in dump:
        if layer.dtype not in FLOATS:
            raise ValueError(
                f"source: {layer.place} is {layer.dtype}; accepted are float16, bfloat16, float32 "
                "and float64"
            )
        if layer.shape[0] != n_tokens:
            raise ValueError(
                f"source: {layer.place} has {layer.shape[0]} tokens, the labels have {n_tokens}"
            )
        if layer.shape != first.shape or layer.dtype != first.dtype:
            raise ValueError(
                f"source: {layer.place} is {layer.dtype} {layer.shape}, but {first.place} is "
                f"{first.dtype} {first.shape}"
            )


def _layer_numbers(
    dump: list[Layer], layers: Sequence[int] | None, n_layers: int | None
) -> list[int]:
    named = [layer.number for layer in dump]
    if layers is not None:
        numbers = [int(layer) for layer in layers]
    elif None in named:
        numbers = list(range(len(dump)))
    else:
        numbers = [int(number or 0) for number in named]
    if len(numbers) != len(dump):
        raise ValueError(f"layers={numbers}: the dump has {len(dump)} layers")
    if numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise ValueError(f"layers={numbers}: accepted are ascending numbers from 0 on")
    if n_layers is not None and n_layers < numbers[-1]:
        raise ValueError(f"n_layers={n_layers}: there is a layer {numbers[-1]}")
    return numbers


def _template(
    table: pd.DataFrame, numbers: list[int], depth: int, dim: int, key: str
) -> xr.Dataset:
    n_tokens = len(table)
    labels = {str(c): ("token", table[c].to_numpy()) for c in table if c != "loss"}
    coords: dict[str, Any] = {
        "model": [key],
        "layer": np.array(numbers),
        "depth": ("layer", np.array(numbers) / max(depth, 1)),
        "token": np.arange(n_tokens),
        **labels,
    }
    lengths = table.groupby("sequence").size().unique()
    length = int(lengths[0]) if len(lengths) == 1 else 1
    skeleton = xr.Dataset(coords=coords)
    run = tokens_per_chunk(skeleton, length, 1, dim)
    hidden = da.zeros((1, len(numbers), n_tokens, dim), chunks=(1, 1, run, dim), dtype=np.float32)
    skeleton["hidden"] = ("model", "layer", "token", "dim"), hidden
    if "loss" in table:
        loss = da.zeros((1, n_tokens), chunks=(1, run), dtype=np.float32)
        skeleton["loss"] = ("model", "token"), loss, {"units": "nat"}
    if len(lengths) == 1:
        skeleton.attrs["window_length"] = length
    return skeleton


def _read(layer: Layer, index: np.ndarray, number: int) -> np.ndarray:
    values = np.concatenate([layer.read(start, stop) for start, stop in contiguous(index)])
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).any(axis=1).sum())
        raise ValueError(f"source: {layer.place} (layer {number}) is not finite in {bad} tokens")
    return values


def _write(
    store: str, key: str, unit: tuple[int, int], values: np.ndarray, start: int, stop: int,
    loss: np.ndarray | None,
) -> None:  # fmt: skip
    every, run = slice(None), slice(start, stop)
    parts: dict[str, np.ndarray] = {"hidden": values[None, None]}
    regions: dict[str, tuple[slice, ...]] = {
        "hidden": (every, slice(unit[0], unit[0] + 1), run, every)
    }
    if loss is not None and unit[0] == 0:
        parts["loss"], regions["loss"] = loss[None, start:stop], (every, run)
    write_unit(store, key, "activations", unit, parts, regions)
