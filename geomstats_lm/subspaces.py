"""Which few directions hold most of the tokenwise parts, and how are two such spaces placed?

The dominant subspace of rows X (n x d) is spanned by the top-m right singular vectors V of X, read
off ``X'X = V S^2 V'`` while the rows stream by; the energy of a vector in it is ``|V'v|^2/|v|^2``,
``m/d`` for a random one, and its angles to another such space W are ``arccos`` of the singular
values of ``V'W``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

GRAM_DIMS = 2048  # up to here d x d numbers are cheap (33 MB) and one pass gives everything
OVERSAMPLE = 16  # directions kept beyond m while streaming in m x d memory
RANK_TOLERANCE = 1e-11  # eigenvalues below this share of the first are rounding of float32 data


class Moments(NamedTuple):
    """What has been seen of a stream of rows, in d x d memory: exact in one pass."""

    n: int
    total: np.ndarray  # (d,) sum of the rows
    gram: np.ndarray  # (d, d) sum of outer products


class Sketch(NamedTuple):
    """The same in (m + oversample) x d memory: the strongest directions so far."""

    n: int
    total: np.ndarray  # (d,)
    energy: float  # sum of squares of all rows
    rows: np.ndarray  # (at most m + oversample, d): S V'


class Subspace(NamedTuple):
    """A dominant subspace and the spectrum it was cut from."""

    basis: np.ndarray  # (most, d) orthonormal rows, zeros beyond ``components``
    singular_values: np.ndarray  # (most,)
    components: int
    energy_share: float  # of the rows' energy
    effective_rank: float
    participation_ratio: float
    centre: np.ndarray  # (d,) what was taken off the rows
    n: int


def streamed_subspace(
    blocks: Callable[[], Iterable[np.ndarray]],
    m: int | float,
    *,
    most: int | None = None,
    centred: bool = False,
    method: str = "auto",
    tolerance: float = 1e-7,
    max_passes: int = 50,
) -> Subspace:
    """The dominant subspace of rows that come block by block.

    Parameters
    ----------
    blocks : callable
        Gives the blocks anew at each call, arrays (n, d).
    m : int or float
        Dimensions, or the share of energy in (0, 1) that the fewest dimensions must hold.
    most : int, optional
        Upper limit of dimensions; m itself, or min(d, 64) for a share.
    centred : bool
        Take the mean row off first.
    method : {"auto", "gram", "sketch"}
        ``gram`` holds d x d numbers and reads the rows once; ``sketch`` holds (m + 16) x d and
        reads them until the subspace stands still.  ``auto`` is ``gram`` up to d = 2048.
    tolerance : float
        Sine of the largest angle by which the last pass may still turn the subspace.
    max_passes : int
        Most passes of ``sketch``.

    Returns
    -------
    Subspace

    Raises
    ------
    ValueError
        If an argument is out of range, there are no rows, or ``sketch`` does not settle.

    Notes
    -----
    ``sketch`` starts from an incremental SVD (Ross et al. 2008) and refines it by subspace
    iteration with Rayleigh-Ritz steps (Halko, Martinsson and Tropp 2011).

    Examples
    --------
    >>> rows = np.diag([3.0, 2.0, 1.0])
    >>> found = streamed_subspace(lambda: [rows[:2], rows[2:]], 1)
    >>> found.basis.round(6), round(found.energy_share, 3)
    (array([[1., 0., 0.]]), 0.643)
    """
    share, most = check_size(m, most)
    if method not in ("auto", "gram", "sketch"):
        raise ValueError(f"method={method!r}: accepted are 'auto', 'gram', 'sketch'")
    seen: Moments | Sketch | None = None
    for block in blocks():
        if seen is None:
            dim = block.shape[1]
            most = min(most, dim)
            gram = method == "gram" or (method == "auto" and dim <= GRAM_DIMS)
            seen = empty_moments(dim) if gram else empty_sketch(dim)
        seen = add_rows(seen, block, most + OVERSAMPLE)
    if seen is None or seen.n == 0:
        raise ValueError("blocks: there are no rows")
    if isinstance(seen, Moments):
        return from_moments(seen, share, most, centred=centred)
    directions = start_directions(seen, centred=centred)
    for _ in range(max_passes):
        images = _images(seen, blocks(), directions, centred)
        refined = refine(images, directions, most)
        moved = _largest_sine(refined[:most], directions[:most])
        directions = refined
        if moved < tolerance:
            break
    else:
        raise ValueError(
            f"max_passes={max_passes}: the subspace still turns by {moved:.1e} a pass; the "
            f"spectrum has no gap after {most} dimensions; use method='gram' or another m"
        )
    images = _images(seen, blocks(), directions, centred)
    return from_images(seen, images, directions, share, most, centred=centred)


def check_size(m: int | float, most: int | None) -> tuple[float | None, int]:
    """(share or None, most dimensions) that an ``m`` stands for, or a clear error."""
    whole = isinstance(m, (int, np.integer)) and not isinstance(m, bool)
    if not ((whole and m >= 1) or (isinstance(m, float) and 0 < m < 1)):
        raise ValueError(f"m={m!r}: accepted are integers >= 1 and shares of energy in (0, 1)")
    if most is not None and most < 1:
        raise ValueError(f"most={most!r}: accepted are integers >= 1")
    if whole:
        return None, int(m) if most is None else min(int(m), most)
    return float(m), 64 if most is None else int(most)


def empty_moments(dim: int) -> Moments:
    """Nothing seen yet."""
    return Moments(0, np.zeros(dim), np.zeros((dim, dim)))


def empty_sketch(dim: int) -> Sketch:
    """Nothing seen yet."""
    return Sketch(0, np.zeros(dim), 0.0, np.zeros((0, dim)))


def add_rows(seen: Moments | Sketch, rows: np.ndarray, keep: int) -> Moments | Sketch:
    """What has been seen once these rows (n, d) are too; a sketch keeps ``keep`` directions."""
    rows = np.asarray(rows, dtype=np.float64)
    n, total = seen.n + len(rows), seen.total + rows.sum(axis=0)
    if isinstance(seen, Moments):
        return Moments(n, total, seen.gram + rows.T @ rows)
    # Rows in the order of arrival; those that do not fit are folded into the strongest directions.
    energy, strongest = seen.energy + float((rows**2).sum()), seen.rows
    for start in range(0, len(rows), keep):
        stacked = np.concatenate([strongest, rows[start : start + keep]])
        _, sizes, directions = np.linalg.svd(stacked, full_matrices=False)
        strongest = sizes[:keep, None] * directions[:keep]
    return Sketch(n, total, energy, strongest)


def from_moments(seen: Moments, share: float | None, most: int, *, centred: bool) -> Subspace:
    """The dominant subspace of all rows seen, exactly."""
    centre = seen.total / max(seen.n, 1) if centred else np.zeros_like(seen.total)
    gram = seen.gram - seen.n * np.outer(centre, centre)
    values, vectors = np.linalg.eigh(gram)
    values = np.maximum(values[::-1], 0.0)
    uncut = float(np.trace(seen.gram))
    # what is left of a mean taken off in float64 is no spectrum
    values[values <= RANK_TOLERANCE * max(values[0], 1e-4 * uncut)] = 0.0
    return _cut(values, vectors[:, ::-1].T, float(values.sum()), share, most, centre, seen.n)


def start_directions(seen: Sketch, *, centred: bool) -> np.ndarray:
    """Orthonormal rows to begin a refinement of a sketch with."""
    rows = seen.rows
    if centred:
        mean = seen.total / seen.n
        size = float(mean @ mean)
        # of rows with a mean: what is across it, and its own direction, which may vary as well
        rows = np.concatenate([rows - np.outer(rows @ mean, mean) / max(size, 1e-300), [mean]])
    return np.linalg.svd(rows, full_matrices=False)[2][: len(seen.rows)]


def image(block: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """What rows (n, d) add to ``(X'X V)'`` for directions V (k, d): (k, d)."""
    rows = np.asarray(block, dtype=np.float64)
    return (rows @ directions.T).T @ rows


def less_mean(seen: Sketch, images: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Images of directions under rows less their mean."""
    mean = seen.total / seen.n
    return images - seen.n * np.outer(directions @ mean, mean)


def refine(images: np.ndarray, directions: np.ndarray, most: int) -> np.ndarray:
    """Orthonormal rows spanning the images, the ``most`` dominant ones first.

    The Ritz vectors of X'X within the span of the directions, multiplied once by X'X.
    """
    within = images @ directions.T
    _, turn = np.linalg.eigh((within + within.T) / 2)
    turned = turn[:, ::-1].T @ images  # strongest first, so that QR keeps their span first
    kept = np.linalg.norm(turned, axis=1) > 1e-14 * np.linalg.norm(images)
    return np.linalg.qr(turned[kept].T)[0].T if kept.any() else directions


def from_images(
    seen: Sketch,
    images: np.ndarray,
    directions: np.ndarray,
    share: float | None,
    most: int,
    *,
    centred: bool,
) -> Subspace:
    """The dominant subspace within the span of directions; the rest counts as spread evenly."""
    centre = seen.total / seen.n if centred else np.zeros_like(seen.total)
    within = images @ directions.T
    values, turn = np.linalg.eigh((within + within.T) / 2)
    values = np.maximum(values[::-1], 0.0)
    uncut = RANK_TOLERANCE * max(values[0], 1e-4 * seen.energy)
    values[values <= uncut] = 0.0
    energy = max(seen.energy - seen.n * float(centre @ centre), float(values.sum()))
    return _cut(values, turn[:, ::-1].T @ directions, energy, share, most, centre, seen.n)


def principal_angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Principal angles of two subspaces, in degrees, smallest first.

    Parameters
    ----------
    a, b : numpy.ndarray, shape (m, dim)
        Orthonormal rows; rows of zeros are none.

    Returns
    -------
    numpy.ndarray, shape (min of both numbers of dimensions,)

    Notes
    -----
    Small angles come from sines, large ones from cosines (Björck and Golub 1973).

    Examples
    --------
    >>> principal_angles(np.eye(3)[:2], np.array([[1.0, 0, 0], [0, 0.6, 0.8]])).round(2)
    array([ 0.  , 53.13])
    """
    a, b = _rows(a), _rows(b)
    if len(a) > len(b):
        a, b = b, a
    if not len(a):
        return np.zeros(0)
    cosines = np.clip(np.linalg.svd(a @ b.T, compute_uv=False), 0, 1)
    sines = np.linalg.svd(a - (a @ b.T) @ b, compute_uv=False)[::-1]
    small = cosines**2 > 0.5
    angles = np.where(small, np.arcsin(np.clip(sines, 0, 1)), np.arccos(cosines))
    return np.degrees(np.sort(angles))


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Mean squared cosine of the principal angles, ``|A B'|^2 / min(m_a, m_b)``; NaN if none.

    A random subspace of b's size has ``max(m_a, m_b) / d``.
    """
    a, b = _rows(a), _rows(b)
    fewest = min(len(a), len(b))
    return float(((a @ b.T) ** 2).sum() / fewest) if fewest else np.nan


def spectrum_measures(values: np.ndarray, rest: float, n_rest: int) -> tuple[float, float]:
    """Effective rank and participation ratio of a spectrum of X'X.

    Parameters
    ----------
    values : numpy.ndarray
        Known eigenvalues.
    rest : float
        Sum of the others, taken as equal: both measures are then upper limits.
    n_rest : int
        How many others there are.

    Returns
    -------
    tuple of float
        ``exp(-sum p log p)`` (Roy and Vetterli 2007) and ``(sum)^2 / sum of squares``.
    """
    total = float(values.sum()) + rest
    if total <= 0:
        return np.nan, np.nan
    p = values[values > 0] / total
    entropy, squares = -float((p * np.log(p)).sum()), float((p**2).sum())
    if rest > 1e-12 * total and n_rest > 0:
        q = rest / total / n_rest
        entropy -= n_rest * q * np.log(q)
        squares += n_rest * q**2
    return float(np.exp(entropy)), 1 / squares


def _cut(
    values: np.ndarray,
    vectors: np.ndarray,
    energy: float,
    share: float | None,
    most: int,
    centre: np.ndarray,
    n: int,
) -> Subspace:
    dim = vectors.shape[1]
    rank = int((values > 0).sum())
    components = min(most, rank)
    if share is not None and energy > 0:
        reached = np.cumsum(values[:components]) >= share * energy * (1 - 1e-12)
        components = min(components, int(reached.argmax()) + 1) if reached.any() else components
    basis, sizes = np.zeros((most, dim)), np.zeros(most)
    kept = vectors[:components]
    # a singular vector has no sign of its own: its largest entry is made positive
    largest = np.abs(kept).argmax(axis=1) if components else np.zeros(0, dtype=int)
    signs = np.sign(kept[np.arange(components), largest])
    basis[:components] = kept * signs[:, None]
    sizes[:components] = np.sqrt(values[:components])
    rest = max(energy - float(values.sum()), 0.0)
    effective, participation = spectrum_measures(values, rest, min(n, dim) - len(values))
    held = float(values[:components].sum()) / energy if energy > 0 else np.nan
    return Subspace(basis, sizes, components, held, effective, participation, centre, n)


def _images(
    seen: Sketch, blocks: Iterable[np.ndarray], directions: np.ndarray, centred: bool
) -> np.ndarray:
    total = np.zeros(directions.shape)
    for block in blocks:
        total += image(block, directions)
    return less_mean(seen, total, directions) if centred else total


def _rows(basis: np.ndarray) -> np.ndarray:
    basis = np.asarray(basis, dtype=np.float64)
    return basis[np.any(basis != 0, axis=1)]


def _largest_sine(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) != len(b):
        return 1.0
    return float(np.linalg.norm(a - (a @ b.T) @ b, 2))
