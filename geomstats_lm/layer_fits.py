"""What does one task of a decomposition compute: a layer's reference, or one run of its tokens?

``prepare`` turns a layer's reference states into everything its runs share; ``fit_run`` then gives
the tokenwise parts ``t = T(x) - x`` and residuals ``r = D - t`` of a run of tokens for all classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

from geomstats_lm import global_fits, self_only
from geomstats_lm.class_labels import ridge_of
from geomstats_lm.function_classes import global_maps
from geomstats_lm.layer_maps import (
    Plan,
    Reference,
    choose_ridges,
    fit_on_tokens,
    norms,
    predict,
)
from geomstats_lm.neighbours import half_squared_norms, row_squares, search_space, to_search_space

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
    "converged": (("model", "function_class", "layer"), np.bool_),
}


def block_norms(rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Norms of some rows of a block (1, 1, n, d)."""
    return norms(block[0, 0][rows])


def taken_rows(rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Some rows of a block (1, 1, n, d), apart from it so that it need not stay in memory."""
    return block[0, 0][rows]


def prepare(
    plan: Plan,
    layer: int,
    blocks_before: Sequence[np.ndarray],
    blocks_after: Sequence[np.ndarray],
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
    blocks_before, blocks_after : sequence of numpy.ndarray, shape (n, d)
        States h_{l-1} and h_l of the reference tokens of each chunk, N in all.
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
    # float16 and other storage formats first become float32: every pass below is compiled
    before, after = (
        np.concatenate(blocks).astype(np.float32, copy=False)
        for blocks in (blocks_before, blocks_after)
    )
    own_before, own_after = np.sqrt(row_squares(before)), np.sqrt(row_squares(after))
    if not (np.isfinite(own_before).all() and np.isfinite(own_after).all()):
        raise ValueError(f"layer {layer}: reference states hold values that are not finite")
    usable = (own_before <= largest_before) & (own_after <= largest_after)
    if not usable.all():
        before, after = before[usable], after[usable]
    if len(before) < plan.largest_k:
        raise ValueError(
            f"layer {layer}: k={plan.largest_k}, but {len(before)} reference tokens are left "
            f"after leaving out {int((~usable).sum())} massive ones"
        )
    update = after - before
    summaries: dict[str, Any] = {
        "reference_update_mean": _float32_mean(update),
        "reference_state_sd": _column_sd(after),
        "reference_norm_median": np.float32(np.median(own_after[usable])),
        "n_reference": np.int64(len(before)),
        "n_reference_excluded_massive": np.int64((~usable).sum()),
    }
    centre = _float32_mean(before)
    before -= centre  # its own copy: concatenate made it
    space = search_space(plan.metric, before)
    targets = update if plan.target == "update" else after
    labels = {name: np.ascontiguousarray(values[usable]) for name, values in tables.items()}
    by_moments = [c for c in plan.classes if c.from_moments]
    sums = global_fits.moments(
        before, targets, centre,
        crossed=any(c.name in global_fits.CROSSED for c in by_moments),
        turned=any(c.name == "orthogonal" for c in by_moments),
        token_ids=labels["token_ids"] if any(c.name == "token_mean" for c in by_moments) else None,
    )  # fmt: skip
    points = to_search_space(space, before)
    ready = Reference(
        layer, before, targets, centre, points, half_squared_norms(points), space, labels,
        largest_before, largest_after, sums, {}, [], {}, summaries,
    )  # fmt: skip
    ready = ready._replace(ridges=choose_ridges(ready, plan))
    if not plan.leave_out:
        maps = global_maps(by_moments, sums, ridges=ready.ridges, target=plan.target)
        ready = ready._replace(maps=maps)
    fitted, converged = fit_on_tokens(ready, plan)
    summaries["ridge"] = np.array([ridge_of(c, ready.ridges) for c in plan.classes], np.float32)
    summaries["converged"] = np.array([converged.get(c.label, True) for c in plan.classes])
    return ready._replace(token_maps=fitted)


def fit_run(
    plan: Plan,
    labels: Mapping[str, np.ndarray],
    ready: Reference,
    before: np.ndarray,
    after: np.ndarray,
    model: Any = None,
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
    model : LanguageModel, optional
        For the class ``self_only``.

    Returns
    -------
    dict of numpy.ndarray
        ``state``, ``update`` (n, d); ``tokenwise``, ``residual`` (classes, n, d);
        ``effective_df`` (classes, n); the per-token diagnostics (n,).
    """
    before = np.asarray(before[0, 0], dtype=np.float32)
    after = np.asarray(after[0, 0], dtype=np.float32)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        raise ValueError(
            f"layer {ready.layer}: states to decompose hold values that are not finite"
        )
    update = after - before
    predicted, effective_df, indices, distances = predict(
        ready, before - ready.centre, labels, plan
    )
    for c, cls in enumerate(plan.classes):
        if cls.name == "identity":
            predicted[c] = 0
        elif cls.name == "self_only":
            mapped = self_only.run_block(model, ready.layer, before, labels["token_ids"])
            predicted[c] = mapped - before
            effective_df[c] = np.nan
        elif plan.target == "state":
            predicted[c] -= before
    if not np.isfinite(predicted).all():
        bad = [c.label for i, c in enumerate(plan.classes) if not np.isfinite(predicted[i]).all()]
        raise FloatingPointError(
            f"layer {ready.layer}: classes {bad} gave predictions that are not finite"
        )
    same = ready.labels["token_ids"][indices[:, : plan.k]] == labels["token_ids"][:, None]
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


def _largest(values: np.ndarray) -> float:
    median = float(np.median(values))
    return MASSIVE * median if median > 0 else np.inf  # half the states zero: nothing to exceed


def _float32_mean(values: np.ndarray) -> np.ndarray:
    return (_column_sums(values, np.zeros(values.shape[1]), False) / len(values)).astype(np.float32)


def _column_sd(values: np.ndarray) -> np.ndarray:
    mean = _column_sums(values, np.zeros(values.shape[1]), False) / len(values)
    return np.sqrt(_column_sums(values, mean, True) / len(values)).astype(np.float32)


@njit(nogil=True, cache=True)
def _column_sums(values, centre, squared):  # type: ignore[no-untyped-def]
    """Sums over rows of values - centre, or of their squares, in float64."""
    total = np.zeros(values.shape[1])
    for i in range(values.shape[0]):
        row = values[i]
        for p in range(values.shape[1]):
            value = np.float64(row[p]) - centre[p]
            total[p] += value * value if squared else value
    return total
