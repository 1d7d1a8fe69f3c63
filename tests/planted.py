"""Decompositions whose residuals were placed by hand."""

from __future__ import annotations

import numpy as np
import xarray as xr


def planted(
    *, layers=1, documents=40, per_document=10, dim=16, ratio=0.7, cosine=None, m=4, energy=None,
    seed=0,
):  # fmt: skip
    """A decomposition with residuals of ``ratio`` times the tokenwise part's norm.

    Their direction is uniform on the sphere, or has a fixed ``cosine`` to the tokenwise part; with
    ``energy`` they have that share of energy in the span of the first m dims, where ``0.9`` of
    the tokenwise parts' energy lies.  Each layer is a draw of its own.
    """
    rng = np.random.default_rng(seed)
    n = documents * per_document
    shape = (1, 1, layers, n, dim)

    def within(share):
        vectors = rng.standard_normal(shape)
        for part, size in ((slice(m), share), (slice(m, None), 1 - share)):
            vectors[..., part] *= np.sqrt(size) / length(vectors[..., part])
        return vectors

    def length(vectors):
        return np.linalg.norm(vectors, axis=-1, keepdims=True)

    tokenwise = within(0.9) * rng.uniform(1, 5, (*shape[:-1], 1))
    residual = rng.standard_normal(shape) if energy is None else within(energy)
    unit = tokenwise / length(tokenwise)
    if cosine is not None:
        residual -= (residual * unit).sum(-1, keepdims=True) * unit
        residual = cosine * unit + np.sqrt(1 - cosine**2) * residual / length(residual)
    residual *= ratio * length(tokenwise) / length(residual)
    dims = ("model", "function_class", "layer", "token", "dim")
    update = (tokenwise + residual)[:, 0]
    state = 3 * rng.standard_normal(update.shape)
    return xr.Dataset(
        {
            "state": (("model", *dims[2:]), state),
            "update": (("model", *dims[2:]), update),
            "tokenwise": (dims, tokenwise),
        },
        {
            "model": ["planted"],
            "function_class": ["planted"],
            "layer": np.arange(1, layers + 1),
            "token": np.arange(n),
            "document": ("token", np.arange(n) // per_document),
        },
    )


def first_dims(data: xr.Dataset, m: int = 4) -> xr.Dataset:
    """The span of the first m dims as the dominant subspace of every layer and class."""
    basis = np.eye(m, data.sizes["dim"])
    lead = ("model", "function_class", "layer")
    shape = tuple(data.sizes[d] for d in lead)
    return xr.Dataset(
        {
            "tokenwise_basis": (
                (*lead, "component", "dim"), np.broadcast_to(basis, (*shape, *basis.shape)).copy(),
            ),
            "tokenwise_centre": ((*lead, "dim"), np.zeros((*shape, data.sizes["dim"]))),
            "tokenwise_components": (lead, np.full(shape, m)),
        },
        {d: data[d] for d in lead},
        {"centred": 0, "m": m},
    )  # fmt: skip
