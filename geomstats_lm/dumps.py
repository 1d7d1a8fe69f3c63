"""How is a dump of states in somebody else's files read piece by piece?

Whatever the format, a dump is a list of layers, each ``(token, dim)``, of which a run of tokens can
be read without reading the rest: ``read(start, stop) = layer[start:stop]``.
"""

from __future__ import annotations

import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

FLOATS = {
    "float16": "float16", "float32": "float32", "float64": "float64", "bfloat16": "bfloat16",
    "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
}  # fmt: skip
SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth", ".zarr")


class Layer(NamedTuple):
    """One layer of a dump."""

    place: str  # file, and array in it
    number: int | None  # layer number that its name tells, if one
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], np.ndarray]


class _Array(NamedTuple):
    place: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    take: Callable[[Any], Any]


def open_dump(
    source: str | Path | Sequence[str | Path], array: str | None, stack: ExitStack
) -> list[Layer]:
    """Layers of a dump, in order, with nothing read yet.

    Parameters
    ----------
    source : str, Path or sequence of them
        A file or Zarr store that holds (layer, token, dim), or one array (token, dim) a layer; a
        folder with one file a layer, ordered by the number in their names; or such files in order.
    array : str, optional
        Which array of a file that holds several.
    stack : contextlib.ExitStack
        Closes files and removes what had to be unpacked.

    Returns
    -------
    list of Layer

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        If a file is of no known format or does not hold what it should; it is named.
    """
    if isinstance(source, (str, Path)):
        if _is_folder_of_files(source):
            files: list[Any] = [f for f in sorted(Path(source).iterdir()) if f.suffix in SUFFIXES]
            if not files:
                raise FileNotFoundError(f"source: {source} holds no {', '.join(SUFFIXES)} files")
            return _in_order([_one_layer(_arrays_of(f, stack), array, f) for f in files])
        return _layers_of(_arrays_of(source, stack), array, source)
    layers = [_one_layer(_arrays_of(f, stack), array, f) for f in source]
    return [layer._replace(number=None) for layer in layers]


def contiguous(index: np.ndarray) -> Iterable[tuple[int, int]]:
    """(start, stop) of the runs of consecutive numbers in an index."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    for run in np.split(index, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _is_folder_of_files(source: str | Path) -> bool:
    path = Path(source)
    marks = ("zarr.json", ".zarray", ".zgroup")
    return (
        "://" not in str(source) and path.is_dir() and not any((path / m).exists() for m in marks)
    )


def _arrays_of(source: str | Path, stack: ExitStack) -> list[_Array]:
    if "://" in str(source) or Path(source).is_dir():
        return _of_zarr(source)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"source: there is no file {path}")
    if path.suffix == ".npy":
        return [_of_numpy(path, "", _mapped(path, path))]
    if path.suffix == ".npz":
        return _of_npz(path, stack)
    if path.suffix == ".safetensors":
        return _of_safetensors(path, stack)
    if path.suffix in (".pt", ".pth"):
        return _of_torch(path)
    raise ValueError(f"source: {path} is none of {', '.join(SUFFIXES)}")


def _mapped(path: Path, file: Any) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"source: {path} is no array of numbers: {error}") from None


def _of_numpy(path: Path, name: str, values: np.ndarray) -> _Array:
    place = f"{path}[{name}]" if name else str(path)
    return _Array(place, name or path.stem, values.shape, str(values.dtype), values.__getitem__)


def _of_npz(path: Path, stack: ExitStack) -> list[_Array]:
    """Arrays of an archive: mapped where they lie, unpacked to disk first where compressed."""
    arrays: list[_Array] = []
    folder: Path | None = None
    if not zipfile.is_zipfile(path):
        raise ValueError(f"source: {path} is no archive of arrays")
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type == zipfile.ZIP_STORED:
                values = _map_stored(path, info)
            else:
                folder = folder or Path(stack.enter_context(TemporaryDirectory()))
                unpacked = folder / f"{len(arrays)}.npy"
                with archive.open(info) as packed, unpacked.open("wb") as file:
                    shutil.copyfileobj(packed, file, 16 << 20)
                values = _mapped(path, unpacked)
            arrays.append(_of_numpy(path, name, values))
    return arrays


def _map_stored(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
        file.seek(name_length + extra_length, 1)
        version = np.lib.format.read_magic(file)
        header: Any = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, fortran, dtype = header(file)
        order: Any = "F" if fortran else "C"
        return np.memmap(path, dtype, "r", file.tell(), shape, order)


def _of_safetensors(path: Path, stack: ExitStack) -> list[_Array]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = stack.enter_context(safe_open(str(path), "pt"))
    except SafetensorError as error:
        raise ValueError(f"source: {path} is no safetensors file: {error}") from None
    arrays = []
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        lazy = file.get_slice(name)
        arrays.append(
            _Array(f"{path}[{name}]", name, tuple(lazy.get_shape()), lazy.get_dtype(),
                   lazy.__getitem__)
        )  # fmt: skip
    return arrays


def _of_torch(path: Path) -> list[_Array]:
    import pickle

    import torch

    try:
        try:
            held: Any = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        except RuntimeError:  # the format of before 2020 cannot be mapped
            held = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, IndexError, EOFError) as error:
        raise ValueError(f"source: {path} holds no plain tensors: {error}") from None
    if torch.is_tensor(held):
        named: dict[str, Any] = {"": held}
    elif isinstance(held, Mapping):
        named = {str(name): value for name, value in held.items()}
    elif isinstance(held, Sequence):
        named = {str(number): value for number, value in enumerate(held)}
    else:
        named = {"": held}
    wrong = [name for name, value in named.items() if not torch.is_tensor(value)]
    if wrong:
        raise ValueError(f"source: {path} holds things that are no tensors: {wrong[:5]}")
    return [
        _Array(
            f"{path}[{name}]" if name else str(path), name or path.stem, tuple(value.shape),
            str(value.dtype).removeprefix("torch."), value.__getitem__,
        )
        for name, value in named.items()
    ]  # fmt: skip


def _of_zarr(source: str | Path) -> list[_Array]:
    import zarr

    try:
        node: Any = zarr.open(str(source), mode="r")
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(f"source: no Zarr array or group at {source}: {error}") from None
    arrays = dict(node.arrays()) if isinstance(node, zarr.Group) else {"": node}
    return [
        _Array(
            f"{source}[{name}]" if name else str(source), name or Path(str(source)).stem, a.shape,
            str(a.dtype), a.__getitem__,
        )
        for name, a in sorted(arrays.items())
    ]  # fmt: skip


def _layers_of(arrays: list[_Array], array: str | None, source: Any) -> list[Layer]:
    """Layers of one file: of its array (layer, token, dim), or its arrays (token, dim)."""
    if array is not None:
        arrays = [_named(arrays, array, source)]
    if not arrays:
        raise ValueError(f"source: {source} holds no array")
    if len(arrays) == 1 and len(arrays[0].shape) == 3:
        stacked = arrays[0]
        return [_layer(stacked, i, None) for i in range(stacked.shape[0])]
    if all(len(a.shape) == 2 for a in arrays):
        return _in_order([_layer(a, None, _number_in(a.name)) for a in arrays])
    shapes = ", ".join(f"{a.name}: {a.shape}" for a in arrays)
    raise ValueError(
        f"source: {source} holds {shapes}; accepted are one array (layer, token, dim), or arrays "
        "(token, dim), one a layer; array= chooses one"
    )


def _one_layer(arrays: list[_Array], array: str | None, source: Any) -> Layer:
    chosen = _named(arrays, array, source) if array is not None else None
    if chosen is None:
        if len(arrays) != 1:
            names = [a.name for a in arrays]
            raise ValueError(f"source: {source} holds {names}; array= chooses one")
        chosen = arrays[0]
    if len(chosen.shape) != 2:
        raise ValueError(f"source: {chosen.place} has shape {chosen.shape}, not (token, dim)")
    return _layer(chosen, None, _number_in(Path(str(source)).stem))


def _named(arrays: list[_Array], array: str, source: Any) -> _Array:
    for candidate in arrays:
        if candidate.name == array:
            return candidate
    raise ValueError(f"array={array!r}: {source} holds {[a.name for a in arrays]}")


def _layer(array: _Array, place: int | None, number: int | None) -> Layer:
    def read(start: int, stop: int) -> np.ndarray:
        run = slice(start, stop)
        values = array.take(run if place is None else (place, run))
        if dtype == "bfloat16":
            values = values.float()
        return np.asarray(values)

    dtype = FLOATS.get(array.dtype.removeprefix("torch."), array.dtype)
    return Layer(array.place, number, array.shape[-2:], dtype, read)


def _number_in(name: str) -> int | None:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def _in_order(layers: list[Layer]) -> list[Layer]:
    numbers = [layer.number for layer in layers]
    if len(layers) == 1:
        return layers
    if None in numbers or len(set(numbers)) < len(numbers):
        places = ", ".join(layer.place for layer in layers[:5])
        raise ValueError(
            f"source: the names of {places} do not number the layers, one each; give the files as "
            "a list in order, with layers="
        )
    return sorted(layers, key=lambda layer: layer.number or 0)
