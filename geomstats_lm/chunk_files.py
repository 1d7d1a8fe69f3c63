"""How is a chunk moved between memory and disk with no copy in between?

In a folder an uncompressed chunk is a file of its values, ``file = chunk.tobytes()``, so it is
written and read as one.  Stores that are no folder, and compressed arrays, go through Zarr.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from geomstats_lm.storage import IncompleteError


def write_chunks(array: Any, region: tuple[slice, ...], values: np.ndarray) -> None:
    """Write whole chunks of a Zarr array, those of nothing but fill values too.

    Parameters
    ----------
    array : zarr.Array
    region : tuple of slice
        Where the values go.
    values : array
        In the array's dtype.
    """
    bounds = [s.indices(n) for s, n in zip(region, array.shape)]
    whole = all(
        start % chunk == 0 and (stop % chunk == 0 or stop == size)
        for (start, stop, _), chunk, size in zip(bounds, array.chunks, array.shape)
    )
    folder = _plain_folder(array)
    if folder is None or not whole or values.dtype != array.dtype:
        array.with_config({"write_empty_chunks": True})[region] = values
        return
    counts = [-(-(stop - start) // c) for (start, stop, _), c in zip(bounds, array.chunks)]
    for index in np.ndindex(*counts):
        block = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, array.chunks))]
        if block.shape != array.chunks:  # the last chunk is stored in full size
            padded = np.full(array.chunks, array.fill_value, dtype=array.dtype)
            padded[tuple(map(slice, block.shape))] = block
            block = padded
        place = [str(i + b[0] // c) for i, b, c in zip(index, bounds, array.chunks)]
        put_chunk(folder.joinpath("c", *place), block)


def put_chunk(path: Path, values: np.ndarray) -> None:
    """Write one file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with half.open("wb") as file:
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def lazy_chunks(array: Any) -> Any:
    """A dask array whose chunks are the files of a Zarr array, or None where Zarr must read it.

    A file that is missing or cut short is an error when it is read.
    """
    import dask.array as da
    from dask.base import tokenize

    folder = _plain_folder(array)
    masked = {"_FillValue", "missing_value", "scale_factor", "add_offset"} & set(array.attrs)
    if folder is None or masked or not array.ndim or not prod(array.shape):
        return None
    changed = os.stat(folder / "zarr.json").st_mtime_ns
    return da.map_blocks(
        _read_chunk, str(folder), array.shape, array.chunks, array.dtype.str,
        chunks=da.core.normalize_chunks(array.chunks, array.shape), dtype=array.dtype,
        meta=np.empty((0,) * array.ndim, dtype=array.dtype),
        name=f"{folder.name}-{tokenize(str(folder), changed)}",
    )  # fmt: skip


def _read_chunk(
    folder: str, shape: Sequence[int], chunks: Sequence[int], dtype: str,
    block_id: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    path = Path(folder).joinpath("c", *map(str, block_id))
    try:
        values = np.fromfile(path, dtype)
    except FileNotFoundError:
        raise IncompleteError(f"chunk {path} is missing; copy the store again") from None
    if values.size != prod(chunks):
        raise IncompleteError(
            f"chunk {path} holds {values.size} values, not {prod(chunks)}; copy the store again"
        )
    inside = tuple(slice(min(c, n - i * c)) for i, c, n in zip(block_id, chunks, shape))
    return values.reshape(tuple(chunks))[inside]


def _plain_folder(array: Any) -> Path | None:
    """The folder of an array whose chunk files are the bytes of the chunks, else None."""
    from zarr.codecs import BytesCodec
    from zarr.storage import LocalStore

    store, serializer = array.store_path.store, array.serializer
    plain = (
        isinstance(store, LocalStore)
        and not array.compressors
        and not array.filters
        and array.shards is None
        and array.dtype.kind in "fiub"
        and isinstance(serializer, BytesCodec)
        and getattr(serializer.endian, "value", sys.byteorder) == sys.byteorder
        and array.metadata.encode_chunk_key((1, 0)) == "c/1/0"
    )
    return store.root / array.path if plain else None
