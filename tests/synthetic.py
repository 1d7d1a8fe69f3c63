"""Activations with planted maps: states of documents and windows as an extraction labels them."""

from __future__ import annotations

import numpy as np
import xarray as xr


def activations(
    *, n_layers=2, dim=12, documents=10, windows=2, window=16, split=0.7, noise=0.1, maps=None,
    vocabulary=20, offset=None, seed=0, chunk_windows=4, model="tiny",
):  # fmt: skip
    """A lazy activations Dataset.

    ``maps`` is one function per layer from states (n, d) to updates (n, d), or one for all; the
    default is a fixed random affine map.  Each update gets Gaussian noise of sd ``noise``.
    ``offset`` is added to dim 0 of the first state.
    """
    rng = np.random.default_rng(seed)
    n = documents * windows * window
    token_id = rng.integers(1, vocabulary, n).astype(np.int32)
    embedding = rng.normal(size=(vocabulary, dim))
    state = embedding[token_id] + 0.5 * rng.normal(size=(n, dim))
    if offset is not None:
        state[:, 0] += offset
    if maps is None:
        slope, shift = 0.3 * rng.normal(size=(dim, dim)) / np.sqrt(dim), rng.normal(size=dim)

        def maps(x):
            return x @ slope + shift

    if callable(maps):
        maps = [maps] * n_layers
    states = [state]
    for layer_map in maps:
        states.append(states[-1] + layer_map(states[-1]) + noise * rng.normal(size=(n, dim)))
    hidden = np.stack(states).astype(np.float32)[None]
    sequence = np.arange(n) // window
    document = sequence // windows
    reference = document < round(split * documents)
    position = np.arange(n) % window
    data = xr.Dataset(
        {
            "hidden": (("model", "layer", "token", "dim"), hidden),
            "loss": (("model", "token"), rng.exponential(size=(1, n)).astype(np.float32)),
        },
        {
            "model": [model],
            "layer": np.arange(n_layers + 1),
            "depth": ("layer", np.arange(n_layers + 1) / n_layers),
            "token": np.arange(n),
            "document": ("token", document.astype(np.int32)),
            "sequence": ("token", sequence.astype(np.int32)),
            "position": ("token", position.astype(np.int32)),
            "token_id": ("token", token_id),
            "char_start": ("token", np.arange(n, dtype=np.int32)),
            "char_end": ("token", np.arange(1, n + 1, dtype=np.int32)),
            "split": ("token", (~reference).astype(np.int8)),
            "is_special": ("token", np.zeros(n, dtype=bool)),
        },
        {"model_name": model, "model_key": model, "window_length": window},
    )
    return data.chunk({"layer": 1, "token": chunk_windows * window})
