"""Which layers and tokens of a model does a cube keep, and how are they cut into chunks?

A chunk holds one layer of a run of whole windows, ``1 MB <= 4 run dim <= 16 MB`` where it can; a
part of an extraction is a run of chunks along the tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.blocks import LanguageModel

CHUNK_BYTES = (1 << 20, 16 << 20)  # least and most bytes of a chunk
CHUNKS_WANTED = 16  # per layer, so that a small cube still feeds several workers
UNIT_BYTES = 128 << 20  # of all layers of a run of tokens, two of which are in memory at a time


def chosen_layers(
    model: LanguageModel, layers: Sequence[int] | None, every: int | None
) -> list[int]:
    """Layer numbers that ``layers=`` or ``every=`` keep, ascending."""
    depth = model.n_layers
    if layers is not None and every is not None:
        raise ValueError("layers and every: accepted is one of them")
    if every is not None:
        if every < 1:
            raise ValueError(f"every={every}: accepted are 1..{depth}")
        return list(range(0, depth + 1, every))
    if layers is None:
        return list(range(depth + 1))
    chosen = sorted({int(layer) for layer in layers})
    if not chosen or chosen[0] < 0 or chosen[-1] > depth:
        raise ValueError(f"layers={list(layers)}: accepted are numbers 0..{depth} of {model.name}")
    return chosen


def kept_tokens(corpus: xr.Dataset, tokens: str | np.ndarray | None) -> np.ndarray:
    """Places of the tokens that a filter keeps."""
    n_tokens = corpus.sizes["token"]
    if tokens is None:
        return np.arange(n_tokens)
    if isinstance(tokens, str):
        labels = pd.DataFrame(
            {n: c.values for n, c in corpus.coords.items() if c.dims == ("token",)}
        )
        try:
            flags = np.asarray(labels.eval(tokens))
        except Exception as error:
            raise ValueError(
                f"tokens={tokens!r} is no condition on {', '.join(map(str, labels))}: {error}"
            ) from None
    else:
        flags = np.asarray(tokens)
    if flags.dtype != bool or flags.shape != (n_tokens,):
        raise ValueError(
            f"tokens: accepted is one true or false for each of {n_tokens} tokens, given "
            f"{flags.dtype} of shape {flags.shape}"
        )
    if not flags.any():
        raise ValueError(f"tokens={tokens!r} keeps no token")
    return np.flatnonzero(flags)


def filter_name(tokens: str | np.ndarray | None, kept: np.ndarray) -> str:
    """What the settings say about a token filter."""
    if tokens is None or isinstance(tokens, str):
        return tokens or "all"
    return f"{len(kept)} flagged, CRC-32 {zlib.crc32(kept.astype(np.int64).data):08x}"


def part_of(n_units: int, part: tuple[int, int] | None) -> np.ndarray:
    """Numbers of the units that the i-th of n parts does, i = 1..n."""
    number, n_parts = part or (1, 1)
    return np.array_split(np.arange(n_units), n_parts)[number - 1]


def tokens_per_chunk(corpus: xr.Dataset, length: int, n_layers: int, dim: int) -> int:
    """Whole windows where all keep equally many tokens, else about as many tokens."""
    in_window = np.unique(corpus.sequence.values, return_counts=True)[1]
    each = int(in_window[0]) if (in_window == in_window[0]).all() else 1
    most = min(CHUNK_BYTES[1], UNIT_BYTES // n_layers)
    aligned = int((corpus.split.values == 0).sum()) // each
    return each * run_of_windows(corpus.sizes["token"] // each, each * dim * 4, aligned, most)


def run_of_windows(
    n_windows: int, window_bytes: int, align: int = 0, most: int = CHUNK_BYTES[1]
) -> int:
    """How many whole windows one chunk holds.

    Between 1 and 16 MB a chunk, small cubes in about 16 runs; a number that divides ``align``
    windows where one is near, so that reference and evaluation tokens share no chunk.
    """
    least = CHUNK_BYTES[0]
    wanted = min(max(n_windows * window_bytes / CHUNKS_WANTED, least), max(most, least))
    run = min(max(1, int(wanted // window_bytes)), n_windows)
    for divisor in range(run, run // 2, -1):
        if align and align % divisor == 0:
            return divisor
    return run
