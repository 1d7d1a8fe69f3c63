"""Small labelled data for the tests of the store: what a model and a corpus would have given."""

from __future__ import annotations

from pathlib import Path

import dask.array as da
import numpy as np
import xarray as xr


def token_labels(n_tokens: int, length: int, n_reference: int | None = None) -> dict:
    """Coordinates on token, reference windows first."""
    at = np.arange(n_tokens)
    cut = n_tokens // 2 if n_reference is None else n_reference
    return {
        "token": at,
        "document": ("token", (at // length).astype(np.int32)),
        "sequence": ("token", (at // length).astype(np.int32)),
        "position": ("token", (at % length).astype(np.int32)),
        "token_id": ("token", (at * 7 % 50).astype(np.int32)),
        "char_start": ("token", (at % length * 2).astype(np.int32)),
        "char_end": ("token", (at % length * 2 + 1).astype(np.int32)),
        "split": ("token", (at >= cut).astype(np.int8)),
        "is_special": ("token", at % length == 0),
    }


def activations(
    n_layers: int = 3,
    n_tokens: int = 24,
    dim: int = 5,
    *,
    length: int = 4,
    run: int = 8,
    seed: int = 0,
    key: str = "tiny",
) -> xr.Dataset:
    """A lazily chunked activations leaf of random states."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(1, n_layers + 1, n_tokens, dim)).astype(np.float32)
    loss = rng.exponential(size=(1, n_tokens)).astype(np.float32)
    loss[:, length - 1 :: length] = np.nan
    return xr.Dataset(
        {
            "hidden": (
                ("model", "layer", "token", "dim"),
                da.from_array(hidden, chunks=(1, 1, run, dim)),
            ),
            "loss": (("model", "token"), da.from_array(loss, chunks=(1, run))),
        },
        {
            "model": [key],
            "layer": np.arange(n_layers + 1),
            "depth": ("layer", np.arange(n_layers + 1) / max(n_layers, 1)),
            **token_labels(n_tokens, length),
        },
        {"model_name": f"org/{key}", "model_key": key, "window_length": length},
    )


def contents(store: str | Path) -> dict[str, bytes]:
    """Every file of a store, by its path in it."""
    root = Path(store)
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}
