"""What does one task of a decomposition compute: a layer's reference, or one run of its tokens?

``prepare`` turns a layer's reference states into everything its runs share; ``fit_run`` then gives
the tokenwise parts ``t = T(x) - x`` and residuals ``r = D - t`` of a run of tokens for all classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from geomstats_lm import global_fits
from geomstats_lm.function_classes import (
    FunctionClass,
    Neighbourhoods,
    global_maps,
    local_predictions,
    ridge_of,
)
from geomstats_lm.neighbours import nearest, search_space, to_search_space

MASSIVE = 5.0  # times the layer's median norm

_BY_CLASS = ("model", "function_class", "layer", "token", "dim")
_BY_TOKEN = ("model", "layer", "token", "dim")
# name -> dims and dtype of everything that a decomposition returns
VARIABLES: dict[str, tuple[tuple[str, ...], Any]] = {
    "state": (_BY_TOKEN, np.float32),
    "update": (_BY_TOKEN, np.float32),
    "tokenwise": (_BY_CLASS, np.float32),
    "residual": (_BY_CLASS, np.float32),
    "effective_df": (_BY_CLASS[:-1], np.float32),
    "is_massive": (_BY_TOKEN[:-1], np.bool_),
    "neighbour_distance": (_BY_TOKEN[:-1], np.float32),
    "same_token_fraction": (_BY_TOKEN[:-1], np.float32),
    "reference_update_mean": (("model", "layer", "dim"), np.float32),
    "reference_state_sd": (("model", "layer", "dim"), np.float32),
    "reference_norm_median": (("model", "layer"), np.float32),
    "n_reference": (("model", "layer"), np.int64),
    "n_reference_excluded_massive": (("model", "layer"), np.int64),
    "ridge": (("model", "function_class", "layer"), np.float32),
}


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

    states: np.ndarray  # (N, d) float32, h_{l-1} about ``centre``
    targets: np.ndarray  # (N, d) float32, D_l or h_l
    centre: np.ndarray  # (d,) float32
    points: np.ndarray  # (N, d) float32, where neighbours are searched
    space: dict[str, Any]
    groups: np.ndarray  # (N,)
    folds: np.ndarray  # (N,)
    token_ids: np.ndarray  # (N,)
    largest_before: float  # norms above these are massive
    largest_after: float
    moments: global_fits.Moments
    maps: dict[str, global_fits.GlobalMap]
    ridges: dict[str, float]
    summaries: dict[str, np.ndarray]


def norms(states: np.ndarray) -> np.ndarray:
    """Euclidean norm over the last dim, in float64."""
    return np.sqrt(np.einsum("...d,...d->...", states, states, dtype=np.float64))


def block_norms(rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Norms of some rows of a block (1, 1, n, d)."""
    return norms(block[0, 0][rows])


def prepare(
    plan: Plan,
    layer: int,
    rows: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    norms_before: Sequence[np.ndarray],
    norms_after: Sequence[np.ndarray],
    tables: Mapping[str, np.ndarray],
) -> Reference:
    """Everything that the runs of one layer share.

    Parameters
    ----------
    plan : Plan
    layer : int
        Named in errors.
    rows : sequence of numpy.ndarray of int
        Which rows of each block are reference tokens, N in all.
    before, after : sequence of numpy.ndarray, shape (1, 1, n, d)
        Blocks of states h_{l-1} and h_l.
    norms_before, norms_after : sequence of numpy.ndarray
        Norms of all reference tokens, for the medians that decide what is massive.
    tables : mapping
        ``groups``, ``folds``, ``token_ids``, ``documents`` of the N reference tokens.

    Raises
    ------
    ValueError
        If states are not finite, or fewer than k tokens are left.
    """
    largest_before = _largest(np.concatenate(norms_before))
    largest_after = _largest(np.concatenate(norms_after))
    before = np.concatenate([block[0, 0][chosen] for block, chosen in zip(before, rows)])
    after = np.concatenate([block[0, 0][chosen] for block, chosen in zip(after, rows)])
    own_before, own_after = norms(before), norms(after)
    if not (np.isfinite(own_before).all() and np.isfinite(own_after).all()):
        raise ValueError(f"layer {layer}: reference states hold values that are not finite")
    usable = (own_before <= largest_before) & (own_after <= largest_after)
    before, after = np.asarray(before[usable], np.float32), np.asarray(after[usable], np.float32)
    needed = plan.largest_k if any(c.is_local for c in plan.classes) else 1
    if len(before) < needed:
        raise ValueError(
            f"layer {layer}: k={needed}, but {len(before)} reference tokens are left after "
            f"leaving out {int((~usable).sum())} massive ones"
        )
    update = after - before
    summaries = {
        "reference_update_mean": _float32_mean(update),
        "reference_state_sd": after.std(0, dtype=np.float64).astype(np.float32),
        "reference_norm_median": np.float32(np.median(own_after[usable])),
        "n_reference": np.int64(len(before)),
        "n_reference_excluded_massive": np.int64((~usable).sum()),
    }
    centre = _float32_mean(before)
    states = before - centre
    space = search_space(plan.metric, states)
    token_ids = np.ascontiguousarray(tables["token_ids"][usable])
    targets = update if plan.target == "update" else after
    sums = global_fits.moments(
        states, targets, centre,
        crossed=any(c.is_global and c.name in global_fits.CROSSED for c in plan.classes),
        token_ids=token_ids if any(c.name == "token_mean" for c in plan.classes) else None,
    )  # fmt: skip
    ridges: dict[str, float] = {}
    chosen = [np.nan if c["ridge"] is None else ridge_of(c, ridges) for c in plan.classes]
    summaries["ridge"] = np.array(chosen, dtype=np.float32)
    return Reference(
        states, targets, centre, to_search_space(space, states), space,
        tables["groups"][usable], tables["folds"][usable], token_ids, largest_before,
        largest_after, sums,
        {} if plan.leave_out else global_maps(plan.classes, sums, ridges=ridges), ridges, summaries,
    )  # fmt: skip


def fit_run(
    plan: Plan,
    labels: Mapping[str, np.ndarray],
    ready: Reference,
    before: np.ndarray,
    after: np.ndarray,
) -> dict[str, np.ndarray]:
    """Decompose the updates of one run of tokens of one layer.

    Parameters
    ----------
    plan : Plan
    labels : mapping
        ``groups``, ``folds`` and ``token_ids`` of the n tokens.
    ready : Reference
    before, after : numpy.ndarray, shape (1, 1, n, d)
        Blocks of states h_{l-1} and h_l.

    Returns
    -------
    dict of numpy.ndarray
        ``state``, ``update`` (n, d); ``tokenwise``, ``residual`` (classes, n, d);
        ``effective_df`` (classes, n); the per-token diagnostics (n,).
    """
    before = np.asarray(before[0, 0], dtype=np.float32)
    after = np.asarray(after[0, 0], dtype=np.float32)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        raise ValueError("states of the tokens to decompose hold values that are not finite")
    update = after - before
    queries = before - ready.centre
    n, d = queries.shape
    classes = plan.classes
    predicted = np.empty((len(classes), n, d), dtype=np.float32)
    effective_df = np.zeros((len(classes), n), dtype=np.float32)
    local = [c for c in classes if c.is_local]
    indices, distances = nearest(
        to_search_space(ready.space, queries), ready.points, plan.largest_k,
        query_groups=labels["groups"], reference_groups=ready.groups, device=plan.device,
    )  # fmt: skip
    if plan.metric != "euclidean":
        distances = _euclidean(queries, ready.states, indices)
    data = Neighbourhoods(
        queries, indices, distances, ready.states, ready.centre, ready.targets
    )  # fmt: skip
    reconstructed: dict[str, np.ndarray] = {}
    if local:
        rows = [i for i, c in enumerate(classes) if c.is_local]
        fitted, df, reconstructed = local_predictions(local, data, k=plan.k, ridges=ready.ridges)
        predicted[rows], effective_df[rows] = fitted, df
    for maps, members in _maps(ready, labels["folds"], plan):
        for c, cls in enumerate(classes):
            if not cls.is_global:
                continue
            mapped = maps[cls.label]
            x = queries[members]
            own = global_fits.predict(mapped, x, labels["token_ids"][members])
            if cls.scope == "global+local":
                # The local map is fitted on what the global one leaves.  Its prediction is a
                # combination W of updates, and G is a matrix, so G(x) + W (D - G(X)) needs
                # no second fit: G is applied to the state and to its reconstruction W X.
                rebuilt = reconstructed[cls.label][members] - ready.centre
                total = predicted[c, members] + own
                predicted[c, members] = total - global_fits.predict(mapped, rebuilt)
                effective_df[c, members] += mapped.effective_df
            else:
                predicted[c, members] = own
                effective_df[c, members] = mapped.effective_df
    for c, cls in enumerate(classes):
        if cls.name == "identity":
            predicted[c] = 0
        elif plan.target == "state":
            predicted[c] -= before
    if not np.isfinite(predicted).all():
        bad = [c.label for i, c in enumerate(classes) if not np.isfinite(predicted[i]).all()]
        raise FloatingPointError(f"classes {bad} gave predictions that are not finite")
    same = ready.token_ids[indices[:, : plan.k]] == labels["token_ids"][:, None]
    return {
        "state": before,
        "update": update,
        "tokenwise": predicted,
        "residual": update - predicted,
        "effective_df": effective_df,
        "is_massive": (norms(before) > ready.largest_before) | (norms(after) > ready.largest_after),
        "neighbour_distance": distances[:, : plan.k].mean(1),
        "same_token_fraction": same.mean(1, dtype=np.float32),
    }


def entry(name: str, member: int | None, source: Mapping[str, Any] | Reference) -> np.ndarray:
    """One block of a variable, under the leading dims of the cube.

    ``source`` is what :func:`fit_run` or :func:`prepare` returned, ``member`` the index of the
    function class where the variable has that dim.
    """
    value = source.summaries[name] if isinstance(source, Reference) else source[name]
    if member is None:
        return np.asarray(value)[None, None]
    return np.asarray(value[member])[None, None, None]


def _maps(
    ready: Reference, folds: np.ndarray, plan: Plan
) -> Sequence[tuple[dict[str, global_fits.GlobalMap], Any]]:
    """Global maps with the queries they serve: one for all, or one per fold left out."""
    wanted = [c for c in plan.classes if c.is_global]
    if not wanted:
        return []
    if not plan.leave_out:
        return [(ready.maps, slice(None))]
    result = []
    for fold in np.unique(folds):
        rows = np.flatnonzero(ready.folds == fold)
        part = global_fits.moments(
            ready.states[rows], ready.targets[rows], ready.centre,
            crossed=ready.moments.xx is not None,
            token_ids=None if ready.moments.tokens is None else ready.token_ids[rows],
        )  # fmt: skip
        sums = global_fits.subtract(ready.moments, part)
        maps = global_maps(wanted, sums, ridges=ready.ridges)
        result.append((maps, np.flatnonzero(folds == fold)))
    return result


def _largest(values: np.ndarray) -> float:
    median = float(np.median(values))
    return MASSIVE * median if median > 0 else np.inf  # half the states zero: nothing to exceed


def _float32_mean(values: np.ndarray) -> np.ndarray:
    return values.mean(0, dtype=np.float64).astype(np.float32)


def _euclidean(queries: np.ndarray, states: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Euclidean distances to neighbours found in another metric, (n, k) float32."""
    distances = np.empty(indices.shape, dtype=np.float32)
    for i, rows in enumerate(indices):
        distances[i] = norms(states[rows] - queries[i])
    return distances
