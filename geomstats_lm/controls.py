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
    drawn = CONTROLS[control](len(own), own.shape[1], np.asarray(donors, float), pool, start, rng)
    norm = np.linalg.norm(own, axis=1, keepdims=True)
    size = np.linalg.norm(drawn, axis=1, keepdims=True)
    # A donor with no residual at all has no direction to lend: then nothing is changed.
    return drawn * np.divide(norm, size, out=np.zeros_like(norm), where=size > 0)


def _exchanged(
    n: int, dim: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    if len(pool) < 2:
        return np.zeros((n, dim))
    tokens = np.arange(start, start + n)
    choice = rng.integers(len(pool), size=n)
    itself = pool[choice] == tokens
    # shifting by 1 … n - 1 places keeps the draw uniform over the others
    choice[itself] = (choice[itself] + rng.integers(1, len(pool), size=itself.sum())) % len(pool)
    return donors[choice]


def _gaussian(
    n: int, dim: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    if len(pool) < 2:
        return np.zeros((n, dim))
    mean = donors.mean(axis=0)
    weights = rng.standard_normal((n, len(donors))) / np.sqrt(len(donors) - 1)
    return mean + weights @ (donors - mean)  # has exactly the donors' covariance


def _isotropic(
    n: int, dim: int, donors: np.ndarray, pool: np.ndarray, start: int, rng: np.random.Generator
) -> np.ndarray:
    return rng.standard_normal((n, dim))


CONTROLS: dict[str, Callable[..., np.ndarray]] = {
    "exchanged": _exchanged,
    "gaussian": _gaussian,
    "isotropic": _isotropic,
}
