"""Which k reference tokens are nearest to each query token, none of them from its own group?

Squared distance ``|q - r|^2 = |q|^2 - 2 (q.r - |r|^2 / 2)``: a blocked matrix product gives the
score ``q.r - |r|^2 / 2`` of every pair, a short list keeps the best, and the few that are kept
are ranked again by their exact distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import njit

FAST = {"nsz", "nnan", "ninf", "reassoc", "contract", "arcp"}
METRICS = ("euclidean", "cosine", "standardized")
MARGIN = 8  # candidates kept beyond k, so that rounding of the scores cannot cost a neighbour
LEAST = np.finfo(np.float32).min
SPARE = 64  # room in a query's list of candidates before it is cut back
LANE = 32  # scores looked at together
QUERY_BLOCK = 512
REFERENCE_BLOCK = 1024


def nearest(
    queries: np.ndarray,
    references: np.ndarray,
    k: int,
    *,
    query_groups: np.ndarray | None = None,
    reference_groups: np.ndarray | None = None,
    half_norms: np.ndarray | None = None,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Exact k nearest references of each query, in the Euclidean metric.

    Parameters
    ----------
    queries : numpy.ndarray, shape (n, d)
        Points to look from, float32, about the same origin as ``references``.
    references : numpy.ndarray, shape (N, d)
        Points to look among, float32. Centre both first: the scores are products.
    k : int
        How many neighbours.
    query_groups, reference_groups : numpy.ndarray of int, shape (n,) and (N,), optional
        A reference of a query's own group (its document, say) is never its neighbour.
    half_norms : numpy.ndarray of float32, shape (N,), optional
        What :func:`half_squared_norms` says of ``references``, where it is known already.
    device : str
        "cpu" for the compiled kernels, anything else a torch device.

    Returns
    -------
    indices : numpy.ndarray of int64, shape (n, k)
        Rows of ``references``, nearest first; equal distances in order of row.
    distances : numpy.ndarray of float32, shape (n, k)

    Raises
    ------
    ValueError
        If shapes disagree, or a query has fewer than k references outside its group.

    Examples
    --------
    >>> line = np.arange(5, dtype=np.float32)[:, None]
    >>> nearest(line[:1], line, 2, query_groups=[0], reference_groups=[0, 0, 1, 1, 1])[0]
    array([[2, 3]])
    """
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    references = np.ascontiguousarray(references, dtype=np.float32)
    if queries.ndim != 2 or references.ndim != 2 or queries.shape[1] != references.shape[1]:
        raise ValueError(
            f"queries {queries.shape} and references {references.shape} must be (n, d) and (N, d)"
        )
    if k < 1:
        raise ValueError(f"k={k}: at least 1 neighbour is needed")
    if (query_groups is None) != (reference_groups is None):
        raise ValueError("query_groups and reference_groups go together: give both or neither")
    own = _as_groups(query_groups, len(queries), "query_groups", -1)
    other = _as_groups(reference_groups, len(references), "reference_groups", -2)
    if device == "cpu":
        indices, distances = _nearest_compiled(queries, references, k, own, other, half_norms)
    else:
        indices, distances = _nearest_torch(queries, references, k, own, other, device)
    short = np.flatnonzero(indices[:, -1] < 0)
    if short.size:
        available = int(np.sum(other != own[short[0]]))
        raise ValueError(
            f"k={k}: query {short[0]} has {available} reference tokens outside its own group; "
            "give a smaller k or more reference documents"
        )
    return indices, distances


def search_space(metric: str, states: np.ndarray) -> dict[str, Any]:
    """What turns states into points whose Euclidean distance is the metric asked for.

    Parameters
    ----------
    metric : {"euclidean", "cosine", "standardized"}
        All three on states centred on the reference mean; "cosine" scales each to length one,
        "standardized" divides each dim by its standard deviation over the references.
    states : numpy.ndarray, shape (N, d)
        Reference states, centred.

    Returns
    -------
    dict
        ``metric`` and ``scale`` (d,), for :func:`to_search_space`.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: accepted are {', '.join(map(repr, METRICS))}")
    scale = None
    if metric == "standardized":
        deviation = np.sqrt(np.einsum("ij,ij->j", states, states, dtype=np.float64) / len(states))
        # a dim that never varies cannot tell tokens apart, whatever its scale
        scale = np.where(deviation > 0, 1 / np.where(deviation > 0, deviation, 1), 0)
        scale = scale.astype(np.float32)
    return {"metric": metric, "scale": scale}


def to_search_space(space: dict[str, Any], states: np.ndarray) -> np.ndarray:
    """Centred states (n, d) as points of a :func:`search_space`; themselves where Euclidean."""
    if space["metric"] == "standardized":
        return states * space["scale"]
    if space["metric"] == "cosine":
        norms = np.sqrt(np.einsum("ij,ij->i", states, states, dtype=np.float64))
        return states / np.where(norms > 0, norms, 1).astype(np.float32)[:, None]
    return states


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold torch's math library to one thread: dask's threads are the parallelism here."""
    import torch

    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def _as_groups(groups: Any, n: int, name: str, missing: int) -> np.ndarray:
    if groups is None:
        return np.full(n, missing, dtype=np.int64)
    values = np.ascontiguousarray(groups, dtype=np.int64)
    if values.shape != (n,):
        raise ValueError(f"{name} has shape {values.shape}; one label per row means ({n},)")
    return values


def _nearest_compiled(
    queries: np.ndarray,
    references: np.ndarray,
    k: int,
    own: np.ndarray,
    other: np.ndarray,
    known_norms: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    import torch

    n, d = queries.shape
    keep = k + MARGIN
    indices = np.full((n, k), -1, dtype=np.int64)
    distances = np.full((n, k), np.nan, dtype=np.float32)
    # Padded to whole blocks: a padding's score is below every threshold.
    blocks = -(-len(references) // REFERENCE_BLOCK)
    lanes = (blocks, REFERENCE_BLOCK // LANE, LANE)
    half_norms = np.full(blocks * REFERENCE_BLOCK, -LEAST, dtype=np.float32)
    if known_norms is None:
        known_norms = half_squared_norms(references)
    half_norms[: len(references)] = known_norms
    groups = np.zeros(blocks * REFERENCE_BLOCK, dtype=np.int64)
    groups[: len(references)] = other
    half_norms, groups = half_norms.reshape(lanes), groups.reshape(lanes)
    # Every product has the same shape whatever the number of queries, so that a query's scores
    # do not depend on which others it is searched with.
    block = np.zeros((QUERY_BLOCK, d), dtype=np.float32)
    product = np.zeros((QUERY_BLOCK, REFERENCE_BLOCK), dtype=np.float32)
    points, left, out = (torch.from_numpy(a) for a in (references, block, product))
    with one_thread():
        for start in range(0, n, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n)
            block[: stop - start] = queries[start:stop]
            scores = np.empty((stop - start, keep + SPARE), dtype=np.float32)
            rows = np.empty(scores.shape, dtype=np.int64)
            counts = np.zeros(stop - start, dtype=np.int64)
            thresholds = np.full(stop - start, LEAST, dtype=np.float32)
            for b in range(blocks):
                first = b * REFERENCE_BLOCK
                part = points[first : first + REFERENCE_BLOCK]
                torch.mm(left, part.T, out=out[:, : len(part)])
                scan_products(
                    product.reshape(QUERY_BLOCK, *lanes[1:]), half_norms[b], own[start:stop],
                    groups[b], first, keep, scores, rows, counts, thresholds,
                )  # fmt: skip
            rank_exactly(
                queries[start:stop], references, keep, scores, rows, counts,
                indices[start:stop], distances[start:stop],
            )  # fmt: skip
    return indices, distances


def half_squared_norms(points: np.ndarray) -> np.ndarray:
    """|r|^2 / 2 of each row, shape (N,) float32."""
    return (row_squares(np.ascontiguousarray(points)) / 2).astype(np.float32)


@njit(nogil=True, cache=True, fastmath=FAST)
def row_squares(points):  # type: ignore[no-untyped-def]
    """|r|^2 of each row in float64, in one pass over memory."""
    out = np.empty(points.shape[0])
    for i in range(points.shape[0]):
        row = points[i]
        total = 0.0
        for p in range(points.shape[1]):
            total += np.float64(row[p]) * np.float64(row[p])
        out[i] = total
    return out


@njit(nogil=True, cache=True, fastmath=FAST)
def scan_products(  # type: ignore[no-untyped-def]
    product, half_norms, own, other, first, keep, scores, rows, counts, thresholds
):
    """Append to each query's list the references of one block that beat its threshold.

    Lists stay in order of row.  Only strictly better scores enter, so that of equal ones the
    earlier row stays.
    """
    capacity, width = scores.shape[1], product.shape[2]
    for i in range(counts.size):
        threshold = thresholds[i]
        count = counts[i]
        for lane in range(half_norms.shape[0]):
            # loops from zero to a length unknown to the compiler: these are vectorized
            found = False
            for j in range(width):
                found = found | (product[i, lane, j] - half_norms[lane, j] > threshold)
            if not found:
                continue
            if count + width > capacity:
                count = cut_back(scores[i], rows[i], count, keep)
                threshold = scores[i, 0]
                for c in range(count):
                    threshold = min(threshold, scores[i, c])
            for j in range(width):
                score = product[i, lane, j] - half_norms[lane, j]
                if score > threshold and other[lane, j] != own[i]:
                    scores[i, count] = score
                    rows[i, count] = first + lane * width + j
                    count += 1
        counts[i] = count
        thresholds[i] = threshold


@njit(nogil=True, cache=True)
def cut_back(scores, rows, count, keep):  # type: ignore[no-untyped-def]
    """Keep the best ``keep`` of a list, in order of row; of equal scores the earlier rows."""
    if count <= keep:
        return count
    # quickselect of the keep-th largest score
    values = scores[:count].copy()
    low, high, wanted = 0, count - 1, keep - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    least = values[wanted]
    ties = keep
    for c in range(count):
        ties -= scores[c] > least
    place = 0
    for c in range(count):
        score, row = scores[c], rows[c]
        equal = score == least and ties > 0
        scores[place], rows[place] = score, row
        place += score > least or equal
        ties -= equal
    return place


@njit(nogil=True, cache=True, fastmath=FAST)
def rank_exactly(  # type: ignore[no-untyped-def]
    queries, references, keep, scores, rows, counts, indices, distances
):
    """Order the best candidates by the distance of their differences, which cannot cancel."""
    k = indices.shape[1]
    best = np.empty(keep, dtype=np.float32)
    order = np.empty(keep, dtype=np.int64)
    for i in range(counts.size):
        count = cut_back(scores[i], rows[i], counts[i], keep)
        query = queries[i]
        for c in range(count):
            row = rows[i, c]
            reference = references[row]
            total = np.float32(0)
            for p in range(query.size):
                difference = query[p] - reference[p]
                total += difference * difference
            place = c
            while place > 0 and best[place - 1] > total:
                best[place] = best[place - 1]
                order[place] = order[place - 1]
                place -= 1
            best[place] = total
            order[place] = row
        if count >= k:
            for c in range(k):
                indices[i, c] = order[c]
                distances[i, c] = np.sqrt(best[c])


def _nearest_torch(
    queries: np.ndarray,
    references: np.ndarray,
    k: int,
    own: np.ndarray,
    other: np.ndarray,
    device: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The same search in torch operations, for accelerators."""
    import torch

    place = torch.device(device)
    points = torch.from_numpy(references).to(place)
    groups = torch.from_numpy(other).to(place)
    half_norms = points.double().square().sum(1).div(2).float()
    indices = np.full((len(queries), k), -1, dtype=np.int64)
    distances = np.full((len(queries), k), np.nan, dtype=np.float32)
    width = 65536
    for start in range(0, len(queries), 1024):
        stop = min(start + 1024, len(queries))
        block = torch.from_numpy(queries[start:stop]).to(place)
        mine = torch.from_numpy(own[start:stop]).to(place)
        scores = block.new_empty((stop - start, 0))
        rows = torch.empty((stop - start, 0), dtype=torch.int64, device=place)
        for first in range(0, len(references), width):
            part = block @ points[first : first + width].T - half_norms[first : first + width]
            part[mine[:, None] == groups[None, first : first + width]] = -torch.inf
            top = part.topk(min(k + MARGIN, part.shape[1]), dim=1)
            scores = torch.cat([scores, top.values], 1)
            rows = torch.cat([rows, top.indices + first], 1)
            kept = scores.topk(min(k + MARGIN, scores.shape[1]), dim=1)
            scores, rows = kept.values, rows.gather(1, kept.indices)
        if rows.shape[1] < k:
            continue
        rows = rows.sort(1).values
        exact = (points[rows] - block[:, None]).square().sum(2)
        exact[groups[rows] == mine[:, None]] = torch.inf
        ranked, order = exact.sort(dim=1, stable=True)
        enough = torch.isfinite(ranked[:, k - 1]).cpu().numpy()
        chosen = rows.gather(1, order[:, :k]).cpu().numpy()
        indices[start:stop][enough] = chosen[enough]
        distances[start:stop][enough] = ranked[:, :k].sqrt().cpu().numpy()[enough]
    return indices, distances
