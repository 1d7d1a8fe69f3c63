"""How do all classes of a layer predict, once its reference tokens are at hand?

``D_hat = G(x)`` of local maps from the token's neighbours, of global ones from moments (less the
token's own documents where they are left out), of global+local ones as
``G(x) + W (D - G(X))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from geomstats_lm import global_fits
from geomstats_lm.class_labels import FunctionClass
from geomstats_lm.function_classes import (
    Neighbourhoods,
    global_maps,
    local_predictions,
    token_maps,
)
from geomstats_lm.neighbours import nearest, to_search_space

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # what ridge="cv" chooses among
CV_TOKENS, CV_FOLDS = 1024, 5


class Plan(NamedTuple):
    """The settings that every task of a decomposition needs."""

    classes: tuple[FunctionClass, ...]
    k: int
    largest_k: int
    target: str
    metric: str
    device: str
    seed: int
    leave_out: bool


class Reference(NamedTuple):
    """One layer's usable reference tokens and what is fitted once on them."""

    layer: int
    states: np.ndarray  # (N, d) float32, h_{l-1} about ``centre``
    targets: np.ndarray  # (N, d) float32, D_l or h_l
    centre: np.ndarray  # (d,) float32
    points: np.ndarray  # (N, d) float32, where neighbours are searched
    half_norms: np.ndarray  # (N,) float32, of ``points``
    space: dict[str, Any]
    labels: dict[str, np.ndarray]  # groups, folds, token_ids, documents, each (N,)
    largest_before: float  # norms above these are massive
    largest_after: float
    moments: global_fits.Moments
    maps: dict[str, global_fits.GlobalMap]  # of moments, fitted on all tokens
    token_maps: list[Any]  # (folds, maps) of the classes fitted on tokens
    ridges: dict[str, float]  # chosen ones
    summaries: dict[str, np.ndarray]


def norms(states: np.ndarray) -> np.ndarray:
    """Euclidean norm over the last dim, in float64."""
    return np.sqrt(np.einsum("...d,...d->...", states, states, dtype=np.float64))


def predict(
    ready: Reference, queries: np.ndarray, labels: Mapping[str, np.ndarray], plan: Plan
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Predicted targets of all fitted classes.

    Parameters
    ----------
    ready : Reference
    queries : numpy.ndarray of float32, shape (n, d)
        States about ``ready.centre``.
    labels : mapping
        ``groups``, ``folds`` and ``token_ids`` of the n tokens.
    plan : Plan

    Returns
    -------
    predicted : numpy.ndarray of float32, shape (classes, n, d)
        Zero for classes that are not fitted.
    effective_df : numpy.ndarray of float32, shape (classes, n)
    indices, distances : numpy.ndarray, shape (n, k)
        Neighbours and their Euclidean distances.
    """
    n, d = queries.shape
    classes = plan.classes
    predicted = np.zeros((len(classes), n, d), dtype=np.float32)
    effective_df = np.zeros((len(classes), n), dtype=np.float32)
    indices, distances = nearest(
        to_search_space(ready.space, queries), ready.points, plan.largest_k,
        query_groups=labels["groups"], reference_groups=ready.labels["groups"],
        half_norms=ready.half_norms, device=plan.device,
    )  # fmt: skip
    if plan.metric != "euclidean":
        distances = _euclidean(queries, ready.states, indices)
    reconstructed: dict[str, np.ndarray] = {}
    local = [c for c, cls in enumerate(classes) if cls.is_local]
    if local:
        data = Neighbourhoods(
            queries, indices, distances, ready.states, ready.centre, ready.targets
        )  # fmt: skip
        predicted[local], effective_df[local], reconstructed = local_predictions(
            [classes[c] for c in local], data, k=plan.k, target=plan.target, ridges=ready.ridges,
            device=plan.device,
        )  # fmt: skip
    for maps, members in _maps(ready, labels["folds"], plan):
        x, ids = queries[members], labels["token_ids"][members]
        for c, cls in enumerate(classes):
            if not cls.from_moments:
                continue
            mapped = maps[cls.label]
            predicted[c, members] += global_fits.predict(mapped, x, ids)
            effective_df[c, members] += mapped.effective_df
            if cls.scope == "global+local":
                # The local map is fitted on what the global one leaves.  Its prediction is a
                # combination W of updates, and G is a matrix, so G(x) + W (D - G(X)) needs
                # no second fit: G is applied to the state and to its reconstruction W X.
                rebuilt = reconstructed[cls.label][members] - ready.centre
                total = global_fits.predict(mapped, rebuilt)
                predicted[c, members] -= total
    for folds, own in ready.token_maps:
        members = np.flatnonzero(np.isin(labels["folds"], folds)) if len(folds) else slice(None)
        for c, cls in enumerate(classes):
            if cls.from_tokens:
                predicted[c, members] = own[cls.label](queries[members] + ready.centre)
                effective_df[c, members] = np.nan
    return predicted, effective_df, indices, distances


def choose_ridges(ready: Reference, plan: Plan) -> dict[str, float]:
    """The rho with the least held-out relative error for each class with ``ridge=cv``.

    Held out within the reference: each of at most 1024 random tokens is predicted from tokens of
    other groups, and by global maps that leave out its fifth of the documents.
    """
    open_classes = [c for c in plan.classes if c["ridge"] == "cv"]
    if not open_classes:
        return {}
    candidates = [
        replace(c, parameters={**c.parameters, "ridge": rho}, label=f"{c.label}/{rho}")
        for c in open_classes
        for rho in RIDGES
    ]
    rng = np.random.default_rng([plan.seed, ready.layer])
    n = len(ready.states)
    rows = np.sort(rng.permutation(n)[:CV_TOKENS])
    folds = _coarse_folds(ready.labels["folds"], rng)
    labels = {**ready.labels, "folds": folds}
    inner = plan._replace(classes=tuple(candidates), leave_out=True)
    predicted = predict(
        ready._replace(labels=labels), ready.states[rows],
        {name: values[rows] for name, values in labels.items()}, inner,
    )[0]  # fmt: skip
    truth = ready.targets[rows]
    base = truth if plan.target == "update" else truth - ready.states[rows] - ready.centre
    size = norms(base)
    counted = size > 0
    error = (norms(truth - predicted)[:, counted] / size[counted]).mean(1)
    table = error.reshape(len(open_classes), len(RIDGES))
    return {c.label: RIDGES[int(best)] for c, best in zip(open_classes, table.argmin(1))}


def _maps(
    ready: Reference, folds: np.ndarray, plan: Plan
) -> Sequence[tuple[dict[str, global_fits.GlobalMap], Any]]:
    """Global maps with the queries they serve: one for all, or one per fold left out."""
    wanted = [c for c in plan.classes if c.from_moments]
    if not wanted:
        return []
    if not plan.leave_out:
        return [(ready.maps, slice(None))]
    result = []
    for fold in np.unique(folds):
        rows = np.flatnonzero(ready.labels["folds"] == fold)
        part = global_fits.moments(
            ready.states[rows], ready.targets[rows], ready.centre,
            crossed=ready.moments.xx is not None, turned=ready.moments.yy is not None,
            token_ids=None if ready.moments.tokens is None else ready.labels["token_ids"][rows],
        )  # fmt: skip
        sums = global_fits.subtract(ready.moments, part)
        maps = global_maps(wanted, sums, ridges=ready.ridges, target=plan.target)
        result.append((maps, np.flatnonzero(folds == fold)))
    return result


def fit_on_tokens(ready: Reference, plan: Plan) -> tuple[list[Any], dict[str, bool]]:
    """Maps of the classes fitted on tokens: one for all, or one per fifth of the folds left out."""
    classes = [c for c in plan.classes if c.from_tokens]
    if not classes:
        return [], {}
    seed = [plan.seed, ready.layer]
    coarse = np.zeros(len(ready.states), dtype=np.int64)
    if plan.leave_out:
        coarse = _coarse_folds(ready.labels["folds"], np.random.default_rng(seed))
    fitted, converged = [], {c.label: True for c in classes}
    for part in np.unique(coarse):
        rows = np.flatnonzero(coarse != part) if plan.leave_out else np.arange(len(coarse))
        maps, done = token_maps(
            classes, ready.states[rows] + ready.centre, ready.targets[rows],
            ready.labels["documents"][rows], seed=seed,
        )  # fmt: skip
        own = np.unique(ready.labels["folds"][coarse == part]) if plan.leave_out else ()
        fitted.append((own, maps))
        converged = {label: converged[label] and done[label] for label in converged}
    return fitted, converged


def _coarse_folds(folds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole folds dealt into five random parts of about the same number of folds."""
    names, rows = np.unique(folds, return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            "leaving documents out needs reference tokens of at least 2 documents, there is 1"
        )
    return (rng.permutation(len(names)) % CV_FOLDS)[rows]


def _euclidean(queries: np.ndarray, states: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Euclidean distances to neighbours found in another metric, (n, k) float32."""
    distances = np.empty(indices.shape, dtype=np.float32)
    for i, rows in enumerate(indices):
        distances[i] = norms(states[rows] - queries[i])
    return distances
