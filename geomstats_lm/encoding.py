"""In which bytes is a value kept, and does it survive that?

bfloat16 is the upper half of a float32, rounded to nearest even and kept as uint16:
``bits16 = (bits32 + 0x7fff + (bits32 >> 16 & 1)) >> 16``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

STORAGE_DTYPES = ("float32", "float16", "bfloat16")
BFLOAT16_NAN = 0x7FC0
CHECKSUM_PIECE = 1 << 19  # bytes: what is copied for the checksum is still in the cache


def checksum(
    parts: Mapping[str, np.ndarray],
    extend: Callable[[int, bytes], int] = google_crc32c.extend,
) -> int:
    """CRC-32C of a unit's stored values, variables in alphabetical order; never 0.

    The Castagnoli polynomial, since processors have an instruction for it; ``extend`` continues
    another checksum instead.
    """
    crc = 0
    for name in sorted(parts):
        values = np.asarray(parts[name])
        if values.dtype.kind in "OTUS":
            text = "\0".join(map(str, values.ravel().tolist()))
            crc = extend(crc, text.encode())
            continue
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        for start in range(0, len(content), CHECKSUM_PIECE):
            crc = extend(crc, bytes(content[start : start + CHECKSUM_PIECE]))
    return crc or 1


def continued_as(long_name: str) -> Callable[[int, bytes], int]:
    """How the checksums of a ledger go on: those not said to be CRC-32C are CRC-32, as once."""
    if long_name.startswith("CRC-32C"):
        return google_crc32c.extend
    return lambda crc, content: zlib.crc32(content, crc)


def encode(
    values: np.ndarray, array: Any, layers: Callable[[], Sequence[int]] = list
) -> np.ndarray:
    """Values in an array's storage dtype; a finite value that overflows there is an error."""
    stored = str(array.attrs.get("storage_dtype", array.dtype))
    if values.dtype.kind != "f" or stored == str(values.dtype):
        return values.astype(array.dtype, copy=False)
    if stored == "bfloat16":
        encoded = to_bfloat16(values)
        infinite = (encoded & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            encoded = values.astype(array.dtype)
        infinite = np.isinf(encoded)
    lost = infinite & np.isfinite(values)
    if lost.any():
        raise OverflowError(_overflow(array, values, lost, layers(), stored))
    return encoded


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # rounding could carry a NaN into an infinity or into zero
    return np.where(np.isnan(values), BFLOAT16_NAN, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _overflow(
    array: Any, values: np.ndarray, lost: np.ndarray, layers: Sequence[int], stored: str
) -> str:
    dims = array.metadata.dimension_names or ()
    where = ""
    if layers and "layer" in dims:
        others = tuple(i for i in range(values.ndim) if i != dims.index("layer"))
        counts = lost.sum(axis=others)
        where = (
            " (" + ", ".join(f"layer {layer}: {n}" for layer, n in zip(layers, counts) if n) + ")"
        )
    largest = float(np.max(np.abs(values[lost])))
    fitting = "float32" if stored == "bfloat16" else "bfloat16 or float32"
    return (
        f"{int(lost.sum())} values of {array.basename!r} overflow {stored}{where}, the largest "
        f"{largest:.4g}; store as {fitting}"
    )
