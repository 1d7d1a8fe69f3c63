"""What would equally large changes do that are not the residual?

Controls replace the residual r of a token by another vector r' with ``|r'| = |r|``: another
token's residual of the same layer, Gaussian noise with the residuals' covariance, or isotropic
noise.  Whatever these do as well is a matter of size, not of what the residual says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

DONORS = 2048  # tokens of a layer that controls draw from: bounds memory, plenty for a draw


def donor_pool(usable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sorted indices of up to ``DONORS`` usable tokens.

    Parameters
    ----------
    usable : numpy.ndarray of bool, shape (token,)
    rng : numpy.random.Generator

    Returns
    -------
    numpy.ndarray of int, shape (n,)
    """
    candidates = np.flatnonzero(usable)
    if len(candidates) > DONORS:
        candidates = rng.choice(candidates, DONORS, replace=False)
    return np.sort(candidates)


def control_residuals(
    control: str,
    own: np.ndarray,
    donors: np.ndarray,
    pool: np.ndarray,
    start: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw a control for the residuals of consecutive tokens.

    Parameters
    ----------
    control : {"exchanged", "gaussian", "isotropic"}
    own : numpy.ndarray, shape (token, dim)
        Residuals of tokens ``start, start + 1, …``.
    donors : numpy.ndarray, shape (n, dim)
        Residuals to draw from.
    pool : numpy.ndarray of int, shape (n,)
        The tokens that the donors belong to.
    start : int
    rng : numpy.random.Generator

    Returns
    -------
    numpy.ndarray of float64, shape (token, dim)
        Of the same norms as ``own``.
    """
    return rescaled(control_vectors(control, len(own), donors, pool, start, rng), own)


def control_vectors(
    control: str,
    n: int,
    donors: np.ndarray,
    pool: np.ndarray,
    start: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw what takes the place of the residuals of n tokens from ``start`` on, at its own norm."""
    return CONTROLS[control](n, donors, pool, start, rng)


def rescaled(vectors: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Vectors of the norms of others, shape (token, dim) both.

    A vector of zeros has no direction to lend: it stays one, so that nothing is changed.
    """
    norm = np.linalg.norm(like, axis=1, keepdims=True).astype(float)
    size = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors * np.divide(norm, size, out=np.zeros_like(norm), where=size > 0)


def participation_ratio(residuals: np.ndarray) -> float:
    """How many directions residuals vary in: ``tr(C)^2 / tr(C^2)`` of their covariance C.

    Parameters
    ----------
    residuals : numpy.ndarray, shape (token, dim)

    Returns
    -------
    float
        1 (one direction) .. dim (all alike); NaN for fewer than two tokens, or no variance.

    Examples
    --------
    >>> participation_ratio(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    2.0
    """
    if len(residuals) < 2:
        return np.nan
    centred = residuals - residuals.mean(axis=0, dtype=float)
    # the smaller of the two Gram matrices has the same eigenvalues
    gram = centred.T @ centred if centred.shape[1] <= len(centred) else centred @ centred.T
    total = float(np.einsum("ij,ij->", gram, gram))
    return float(np.trace(gram)) ** 2 / total if total > 0 else np.nan


def other_tokens(
    n: int, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray | None:
    """For each of n tokens from ``start`` on, the place in the pool of a token that is not it."""
    if len(pool) < 2:
        return None
    tokens = np.arange(start, start + n)
    choice = rng.integers(len(pool), size=n)
    itself = pool[choice] == tokens
    # shifting by 1 … n - 1 places keeps the draw uniform over the others
    choice[itself] = (choice[itself] + rng.integers(1, len(pool), size=itself.sum())) % len(pool)
    return choice


def _exchanged(
    n: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    choice = other_tokens(n, pool, start, rng)
    if choice is None:
        return np.zeros((n, donors.shape[1]))
    return donors[choice].astype(float)


def _gaussian(
    n: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    if len(pool) < 2:
        return np.zeros((n, donors.shape[1]))
    mean = donors.mean(axis=0, dtype=float)
    weights = rng.standard_normal((n, len(donors))) / np.sqrt(len(donors) - 1)
    return mean + weights @ (donors - mean)  # has exactly the donors' covariance


def _isotropic(
    n: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    return rng.standard_normal((n, donors.shape[1]))


CONTROLS: dict[str, Callable[..., np.ndarray]] = {
    "exchanged": _exchanged,
    "gaussian": _gaussian,
    "isotropic": _isotropic,
}
