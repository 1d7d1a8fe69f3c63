"""Which maps may a tokenwise part be, and how does each predict the update from the state?

A class predicts ``D_hat = G(x)``, hence ``T(x) = x + G(x)``.  Local classes are fitted anew for
every query token on its k nearest reference tokens, global ones once per layer; both are array
code here, with no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from geomstats_lm import global_fits, local_kernels, mlp, spectral_kernels
from geomstats_lm.class_labels import GLOBAL_RIDGE, FunctionClass, ridge_of


class Neighbourhoods(NamedTuple):
    """The neighbours of a run of queries, and where to find them."""

    queries: np.ndarray  # (n, d) float32, states about ``centre``
    neighbours: np.ndarray  # (n, k) int64, rows of ``states``
    distances: np.ndarray  # (n, k) float32, nearest first
    states: np.ndarray  # (N, d) float32, reference states about ``centre``
    centre: np.ndarray  # (d,) float32
    targets: np.ndarray  # (N, d) float32


def local_predictions(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    *,
    k: int,
    target: str = "update",
    ridges: Mapping[str, float] | None = None,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Predictions of all local maps, those of one neighbourhood and weighting fitted together.

    Parameters
    ----------
    classes : sequence of FunctionClass
        Local ones.
    data : Neighbourhoods
        With at least as many neighbours as any class asks for.
    k : int
        Neighbours of the classes that do not name their own number.
    target : {"update", "state"}
        What ``data.targets`` are.
    ridges : mapping of label to float, optional
        Chosen values for the classes with ``ridge=cv``.
    device : str
        "cpu" for the compiled kernels, anything else a torch device.

    Returns
    -------
    predictions : numpy.ndarray of float32, shape (classes, n, d)
    effective_df : numpy.ndarray of float32, shape (classes, n)
    reconstructed : dict of label to numpy.ndarray, shape (n, d)
        For global+local classes X' w, the state as the neighbours combine to it.
    """
    n, d = data.queries.shape
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    effective_df = np.full((len(classes), n), np.nan, dtype=np.float32)
    reconstructed = {}
    groups: dict[tuple[int, str], list[int]] = {}
    for c, cls in enumerate(classes):
        groups.setdefault((cls["k"] or k, cls["weights"] or "uniform"), []).append(c)
    for (size, weighting), members in groups.items():
        part = data._replace(
            neighbours=np.ascontiguousarray(data.neighbours[:, :size]),
            distances=data.distances[:, :size],
        )
        weights = kernel_weights(part.distances, weighting)
        for fit, chosen in _by_kernel(classes, members, target, device):
            fitted, df, rest = fit([classes[c] for c in chosen], part, weights, ridges or {})
            predictions[chosen], effective_df[chosen] = fitted, df
            reconstructed.update(rest)
    return predictions, effective_df, reconstructed


def kernel_weights(distances: np.ndarray, weighting: str) -> np.ndarray:
    """Weights of neighbours, float32 of the shape of ``distances`` (n, k), each row summing to 1.

    ``u = distance / (1.0001 * distance of the k-th)``; tricube ``(1 - u^3)^3``, epanechnikov
    ``1 - u^2``, gaussian ``exp(-2 u^2)``; uniform where all distances are zero.
    """
    far = distances[:, -1:].astype(np.float64) * 1.0001
    u = np.divide(distances, far, out=np.zeros(distances.shape), where=far > 0)
    if weighting == "tricube":
        weights = (1 - u**3) ** 3
    elif weighting == "epanechnikov":
        weights = 1 - u**2
    elif weighting == "gaussian":
        weights = np.exp(-2 * u**2)
    else:
        weights = np.ones(distances.shape)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def global_maps(
    classes: Sequence[FunctionClass],
    moments: global_fits.Moments,
    *,
    ridges: Mapping[str, float],
    target: str = "update",
) -> dict[str, global_fits.GlobalMap]:
    """The fitted global map of every class that has one, by label."""
    maps = {}
    for cls in classes:
        if cls.from_moments:
            rho = GLOBAL_RIDGE if cls.scope == "global+local" else ridge_of(cls, ridges)
            maps[cls.label] = global_fits.fit(
                cls.name, moments, ridge=rho, rank=cls["rank"], scale=cls["scale"], target=target
            )
    return maps


def token_maps(
    classes: Sequence[FunctionClass],
    states: np.ndarray,
    targets: np.ndarray,
    documents: np.ndarray,
    *,
    seed: Any,
) -> tuple[dict[str, Callable[[np.ndarray], np.ndarray]], dict[str, bool]]:
    """Maps of the global classes fitted on the tokens themselves, by label.

    Parameters
    ----------
    classes : sequence of FunctionClass
        ``mlp`` and registered global ones.
    states, targets : numpy.ndarray of float32, shape (N, d)
        Raw reference states and what is to be predicted.
    documents : numpy.ndarray of int, shape (N,)
    seed : int or sequence of int

    Returns
    -------
    maps : dict of label to function
        From states (n, d) to predicted targets (n, d).
    converged : dict of label to bool
    """
    maps: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    converged = {}
    for cls in classes:
        if cls.function is not None:
            own = cls.function(states, targets, **cls.parameters)
            if not callable(own):
                raise ValueError(
                    f"function class {cls.name!r} returned a {type(own).__name__}; a global one "
                    "returns a function from states to predicted updates"
                )
            maps[cls.label] = partial(_call_checked, cls.name, own)
            converged[cls.label] = True
        else:
            fitted = mlp.fit(states, targets, documents, hidden=cls["hidden"], seed=seed)
            maps[cls.label] = partial(mlp.predict, fitted)
            converged[cls.label] = fitted.converged
    return maps, converged


def _call_checked(name: str, function: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    returned = function(x)
    _check_returned(name, returned, x.shape)
    return np.asarray(returned, dtype=np.float32)


_KINDS = {
    "local_mean": local_kernels.LOCAL_MEAN,
    "scalar": local_kernels.SCALAR,
    "diagonal": local_kernels.DIAGONAL,
    "linear": local_kernels.LINEAR,
    "affine": local_kernels.AFFINE,
    "low_rank": local_kernels.LOW_RANK,
}
_SYSTEMS = ("linear", "affine", "low_rank")  # the classes that solve a k x k system


def _by_kernel(
    classes: Sequence[FunctionClass], members: Sequence[int], target: str, device: str
) -> list[tuple[Callable[..., Any], list[int]]]:
    """The classes among ``members`` that one kernel fits in one pass, with that kernel."""
    turned = [c for c in members if classes[c].name == "orthogonal"]
    own = [c for c in members if classes[c].function is not None]
    combined = [c for c in members if c not in turned and c not in own]
    if device != "cpu":
        from geomstats_lm import torch_fits

        batched = partial(torch_fits.fit, target=target, device=device)
        passes: list[tuple[Callable[..., Any], list[int]]] = [(batched, combined + turned)]
    else:
        passes = [(_fit_combinations, combined), (partial(_fit_orthogonal, target), turned)]
    passes += [(_fit_registered, [c]) for c in own]
    return [(fit, chosen) for fit, chosen in passes if chosen]


def _fit_combinations(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Local maps that share a Gram matrix, in one pass."""
    n, d = data.queries.shape
    systems: list[tuple[bool, float]] = []
    factors = np.full(len(classes), -1, dtype=np.int64)
    kinds = np.empty(len(classes), dtype=np.int64)
    rho = np.zeros(len(classes), dtype=np.float64)
    ranks = np.ones(len(classes), dtype=np.int64)
    rest = np.full(len(classes), -1, dtype=np.int64)
    for c, cls in enumerate(classes):
        kinds[c] = _KINDS[cls.name]
        rho[c] = np.nan_to_num(ridge_of(cls, ridges))
        ranks[c] = cls["rank"] or 1
        if cls.name in _SYSTEMS:
            system = (cls.name == "affine", rho[c])
            if system not in systems:
                systems.append(system)
            factors[c] = systems.index(system)
        if cls.scope == "global+local":
            rest[c] = rest.max() + 1
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    reconstructed = np.empty((rest.max() + 1, n, d), dtype=np.float32)
    df = np.empty((len(classes), n), dtype=np.float32)
    local_kernels.fit_neighbourhoods(
        np.ascontiguousarray(data.queries), data.neighbours, weights, data.states, data.centre,
        data.targets, np.array([s[0] for s in systems], dtype=bool),
        np.array([s[1] for s in systems], dtype=np.float64), kinds, factors, rho, ranks,
        predictions, rest, reconstructed, df,
        True if local_kernels.LOW_RANK in kinds else None,
    )  # fmt: skip
    left = {cls.label: reconstructed[r] for cls, r in zip(classes, rest) if r >= 0}
    return predictions, df, left


def _fit_orthogonal(
    target: str,
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    n, d = data.queries.shape
    k = data.neighbours.shape[1]
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    spectral_kernels.fit_orthogonal(
        np.ascontiguousarray(data.queries), data.neighbours, weights, data.states, data.centre,
        data.targets, target == "state", np.array([c["scale"] for c in classes]), predictions,
    )  # fmt: skip
    df = np.empty((len(classes), n), dtype=np.float32)
    for c, cls in enumerate(classes):
        df[c] = orthogonal_df(min(k, d), d, cls["scale"])
    return predictions, df, {}


def orthogonal_df(m: int, d: int, scale: bool) -> float:
    """Coefficients per output dim of an orthogonal map that m directions determine."""
    return (m * d - m * (m + 1) / 2 + scale) / d


def _fit_registered(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """A user's own local class, called on as many tokens at a time as fit in 64 MB."""
    (cls,) = classes
    assert cls.function is not None
    n, d = data.queries.shape
    k = data.neighbours.shape[1]
    predictions = np.empty((1, n, d), dtype=np.float32)
    run = max(1, 2**24 // (k * d))
    for start in range(0, n, run):
        rows = data.neighbours[start : start + run]
        x = data.queries[start : start + run] + data.centre
        returned = cls.function(
            x, data.states[rows] + data.centre, data.targets[rows],
            weights[start : start + run], **cls.parameters,
        )  # fmt: skip
        _check_returned(cls.name, returned, x.shape)
        predictions[0, start : start + run] = returned
    return predictions, np.full((1, n), np.nan, dtype=np.float32), {}


def _check_returned(name: str, returned: Any, shape: tuple[int, ...]) -> None:
    if np.shape(returned) != shape:
        raise ValueError(
            f"function class {name!r} returned shape {np.shape(returned)}; "
            f"predictions for these tokens have shape {shape}"
        )
