"""Which one map per layer fits all its reference tokens?

Every global map is a function of moments: ``n``, ``sum x``, ``sum D``, ``X'X``, ``X'D``; e.g.
affine ``B = (Sxx + lambda I)^-1 Sxd``.  Moments subtract, so leaving a document out costs its own
tokens only.  All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

BLOCK = 8192  # rows turned to float64 at a time
CROSSED = (
    "linear",
    "affine",
    "low_rank",
    "orthogonal",
)  # the classes whose fit needs the d x d sums


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of states (about ``centre``) and targets; what is not needed is None."""

    centre: np.ndarray  # (d,)
    n: int
    x: np.ndarray  # (d,) sum of states
    y: np.ndarray  # (d,) sum of targets
    xx_diagonal: np.ndarray  # (d,) sum of squared states
    xy_diagonal: np.ndarray  # (d,) sum of state * target, elementwise
    xx: np.ndarray | None = None  # (d, d)
    xy: np.ndarray | None = None  # (d, d)
    yy: np.ndarray | None = None  # (d, d)
    tokens: np.ndarray | None = None  # (V,) token ids seen, sorted
    token_n: np.ndarray | None = None  # (V,)
    token_y: np.ndarray | None = None  # (V, d) sum of targets by token id


@dataclass(frozen=True)
class GlobalMap:
    """``G(x) = intercept + slope x``, or a table by token id; x about ``centre``."""

    intercept: np.ndarray  # (d,)
    slope: np.ndarray | None = None  # (d,) elementwise or (d, d) with row vectors: x @ slope
    effective_df: float = np.nan
    tokens: np.ndarray | None = None
    table: np.ndarray | None = None  # (V, d)
    details: Any = None  # what a class's own prediction needs


def moments(
    states: np.ndarray,
    targets: np.ndarray,
    centre: np.ndarray,
    *,
    crossed: bool,
    turned: bool = False,
    token_ids: np.ndarray | None = None,
) -> Moments:
    """Moments of float32 states (N, d), about ``centre``, and targets (N, d).

    ``crossed`` asks for X'X and X'Y, ``turned`` for Y'Y, ``token_ids`` (N,) for the sums by token
    id.
    """
    n, d = states.shape
    x, y, squares, products = (np.zeros(d) for _ in range(4))
    xx = np.zeros((d, d)) if crossed else None
    xy = np.zeros((d, d)) if crossed else None
    yy = np.zeros((d, d)) if turned else None
    for start in range(0, n, BLOCK):
        a = states[start : start + BLOCK].astype(np.float64)
        b = targets[start : start + BLOCK].astype(np.float64)
        x += a.sum(0)
        y += b.sum(0)
        squares += np.einsum("ij,ij->j", a, a)
        products += np.einsum("ij,ij->j", a, b)
        if xx is not None and xy is not None:
            xx += _product(a, a)
            xy += _product(a, b)
        if yy is not None:
            yy += _product(b, b)
    tokens = token_n = token_y = None
    if token_ids is not None:
        tokens, rows, token_n = np.unique(token_ids, return_inverse=True, return_counts=True)
        token_y = np.zeros((len(tokens), d))
        order = np.argsort(rows, kind="stable")
        starts = np.concatenate([[0], np.cumsum(token_n)])
        for first in range(0, len(tokens), 1024):
            last = min(first + 1024, len(tokens))
            chosen = targets[order[starts[first] : starts[last]]].astype(np.float64)
            token_y[first:last] = np.add.reduceat(
                chosen, starts[first:last] - starts[first], axis=0
            )
    return Moments(np.asarray(centre, dtype=np.float64), n, x, y, squares, products, xx, xy, yy,
                   tokens, token_n, token_y)  # fmt: skip


def subtract(whole: Moments, part: Moments) -> Moments:
    """Moments of the tokens of ``whole`` that are not in ``part``."""
    values: dict[str, Any] = {"centre": whole.centre}
    for item in fields(Moments):
        if item.name == "centre" or item.name.startswith("token"):
            continue
        all_of, some = getattr(whole, item.name), getattr(part, item.name)
        values[item.name] = None if all_of is None else all_of - some
    if whole.tokens is not None and whole.token_n is not None and whole.token_y is not None:
        assert part.tokens is not None
        counts, sums = whole.token_n.copy(), whole.token_y.copy()
        rows = np.searchsorted(whole.tokens, part.tokens)
        counts[rows] -= part.token_n
        sums[rows] -= part.token_y
        left = counts > 0
        values.update(tokens=whole.tokens[left], token_n=counts[left], token_y=sums[left])
    return Moments(**values)


def fit(
    name: str,
    sums: Moments,
    *,
    ridge: float = 1e-2,
    rank: int | None = None,
    scale: bool = True,
    target: str = "update",
) -> GlobalMap:
    """Fit one global class.

    Parameters
    ----------
    name : str
        ``mean``, ``token_mean``, ``scalar``, ``diagonal``, ``linear``, ``affine``,
        ``low_rank`` or ``orthogonal``.
    sums : Moments
        With the parts that the class needs.
    ridge : float
        rho of ``lambda = rho tr(X'X) / min(n, d) + 1e-6 |mean x|^2``.
    rank : int, optional
        Of ``low_rank``.
    scale, target
        Of ``orthogonal``: whether it has a scale s, and whether targets are updates or states.

    Raises
    ------
    ValueError
        If no tokens are left to fit on.
    """
    if sums.n < 1:
        raise ValueError(f"{name}: no reference token is left to fit on")
    d = sums.x.size
    mean_x, mean_y = sums.x / sums.n, sums.y / sums.n
    raw_mean = mean_x + sums.centre
    if name == "mean":
        return GlobalMap(mean_y, effective_df=1)
    if name == "token_mean":
        assert sums.token_n is not None and sums.token_y is not None and sums.tokens is not None
        table = (sums.token_y / sums.token_n[:, None]).astype(np.float32)
        return GlobalMap(mean_y, effective_df=len(table), tokens=sums.tokens, table=table)
    if name == "scalar":
        # raw sums from sums about the centre c: x = c + z
        cross = sums.xy_diagonal.sum() + sums.centre @ sums.y
        size = (1 + ridge) * raw_square(sums)
        slope = np.full(d, cross / size if size > 0 else 0.0)
        return GlobalMap(slope * sums.centre, slope, effective_df=1 / ((1 + ridge) * d))
    if name == "diagonal":
        variation = np.maximum(sums.xx_diagonal - sums.n * mean_x**2, 0)
        cross = sums.xy_diagonal - sums.n * mean_x * mean_y
        size = variation + ridge * variation.mean()
        slope = np.divide(cross, size, out=np.zeros(d), where=size > 0)
        df = 1 + float(np.divide(variation, size, out=np.zeros(d), where=size > 0).mean())
        return GlobalMap(mean_y - slope * mean_x, slope, effective_df=df)
    assert sums.xx is not None and sums.xy is not None
    if name == "affine":
        xx = sums.xx - sums.n * np.outer(mean_x, mean_x)
        xy = sums.xy - sums.n * np.outer(mean_x, mean_y)
    else:
        xx, xy = raw_moments(sums)
    if name == "orthogonal":
        return _orthogonal(sums, xx, xy, scale=scale, target=target)
    penalty = ridge * np.trace(xx) / min(sums.n, d) + 1e-6 * raw_mean @ raw_mean
    slope, df = ridge_solve(xx, xy, penalty)
    if name == "affine":
        return GlobalMap(mean_y - mean_x @ slope, slope, effective_df=1 + df)
    if name == "low_rank":
        # the directions in which the ridge map's fitted targets vary most
        kept = min(rank or d, d)
        directions = symmetric_eigen(xy.T @ slope)[1][:, -kept:]
        slope = (slope @ directions) @ directions.T
        free = min(float(kept), df)
        df = free * (df + d - free) / d
    return GlobalMap(sums.centre @ slope, slope, effective_df=df)


def _orthogonal(
    sums: Moments, xx: np.ndarray, xy: np.ndarray, *, scale: bool, target: str
) -> GlobalMap:
    """T(x) = s Q x inside the span of X and Y and x off it; as a map to the target."""
    import torch

    from geomstats_lm.neighbours import one_thread

    assert sums.yy is not None
    d = len(xx)
    size = np.trace(xx)
    if target == "update":  # Y = X + D
        cross, squares = xx + xy, xx + xy + xy.T + sums.yy
    else:
        cross, squares = xy, sums.yy
    with one_thread():
        left, _, right = torch.linalg.svd(torch.from_numpy(cross.T + 1e-10 * size / d * np.eye(d)))
    turn = (left @ right).numpy()
    s = float(np.sum(turn * cross.T) / size) if scale and size > 0 else 1.0
    values, vectors = symmetric_eigen(xx + squares)
    span = vectors[:, values > 1e-10 * max(values[-1], 0.0)]
    inside = span @ span.T
    slope = (s * turn @ inside + np.eye(d) - inside).T
    if target == "update":
        slope = slope - np.eye(d)
    df = ((d - 1) / 2) + float(scale) / d
    return GlobalMap(sums.centre @ slope, slope, effective_df=df)


def raw_square(sums: Moments) -> float:
    """Sum of squared raw states, from sums about the centre."""
    cross = 2 * sums.centre @ sums.x + sums.n * sums.centre @ sums.centre
    return float(sums.xx_diagonal.sum() + cross)


def raw_moments(sums: Moments) -> tuple[np.ndarray, np.ndarray]:
    """X'X and X'Y of raw states, from sums about the centre."""
    assert sums.xx is not None and sums.xy is not None
    mixed = np.outer(sums.centre, sums.x)
    xx = sums.xx + mixed + mixed.T + sums.n * np.outer(sums.centre, sums.centre)
    return xx, sums.xy + np.outer(sums.centre, sums.y)


def ridge_solve(xx: np.ndarray, xy: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """(X'X + lambda I)^-1 X'Y and its degrees of freedom tr(X'X (X'X + lambda I)^-1)."""
    values, vectors = symmetric_eigen(xx)
    values = np.maximum(values, 0)
    # directions without variation carry no information; lambda = 0 must not divide by them
    floor = max(values[-1], 0) * len(values) * np.finfo(np.float64).eps
    usable = values > floor
    inverse = np.divide(1.0, values + penalty, out=np.zeros_like(values), where=usable)
    slope = (vectors * inverse) @ (vectors.T @ xy)
    return slope, float(np.sum(values * inverse))


def symmetric_eigen(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending eigenvalues and eigenvectors, on one thread so that every worker agrees."""
    import torch

    from geomstats_lm.neighbours import one_thread

    with one_thread():
        values, vectors = torch.linalg.eigh(torch.from_numpy(np.ascontiguousarray(matrix)))
    return values.numpy(), vectors.numpy()


def predict(
    fitted: GlobalMap, queries: np.ndarray, token_ids: np.ndarray | None = None
) -> np.ndarray:
    """G(x) of float32 queries (n, d) about the centre, float32."""
    intercept = fitted.intercept.astype(np.float32)
    if fitted.table is not None:
        assert fitted.tokens is not None and token_ids is not None
        rows = np.minimum(np.searchsorted(fitted.tokens, token_ids), len(fitted.tokens) - 1)
        seen = fitted.tokens[rows] == token_ids
        return np.where(seen[:, None], fitted.table[rows], intercept)
    if fitted.slope is None:
        return np.broadcast_to(intercept, queries.shape)
    slope = fitted.slope.astype(np.float32)
    return intercept + (queries * slope if slope.ndim == 1 else _product(queries.T, slope))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a' b on one thread of the math library."""
    import torch

    from geomstats_lm.neighbours import one_thread

    with one_thread():
        return (torch.from_numpy(a).T @ torch.from_numpy(b)).numpy()
