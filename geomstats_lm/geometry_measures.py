"""Which numbers say how vectors ``D = t + r`` are placed, whatever labels they carry?

Array functions along the last axis, sums in float64: ``e = |r| / |D|``,
``cos(a, b) = a.b / |a||b|``, and the values that e forces at a right angle,
``cos(D, t) = sqrt(1 - e^2)`` and ``cos(D, r) = e``.
"""

from __future__ import annotations

import numpy as np

# name -> (long name, units), of what belongs to a token whatever the function class
STATE_MEASURES = {
    "state_norm": ("norm of the state before the block", ""),
    "next_state_norm": ("norm of the state after the block", ""),
    "update_norm": ("norm of the update", ""),
    "update_centred_norm": ("norm of the update less its reference mean", ""),
    "cos_next_state_state": ("cosine of the states after and before the block", ""),
    "angle_next_state_state": ("angle of the states after and before the block", "degree"),
}
# the same for a (function class, token)
CLASS_MEASURES = {
    "tokenwise_norm": ("norm of the tokenwise part", ""),
    "residual_norm": ("norm of the residual", ""),
    "residual_norm_standardized": ("norm of the residual in standard deviations per dim", ""),
    "relative_error": ("norm of the residual over norm of the update", ""),
    "cos_update_tokenwise": ("cosine of update and tokenwise part", ""),
    "cos_centred": ("cosine of update and tokenwise part, both less the mean update", ""),
    "cos_update_residual": ("cosine of update and residual", ""),
    "cos_next_state_tokenwise": ("cosine of the state after the block and its approximation", ""),
    "cos_residual_tokenwise": ("cosine of residual and tokenwise part", ""),
    "angle_next_state_tokenwise": (
        "angle of the state after the block and its approximation", "degree",
    ),
    "angle_update_tokenwise": ("angle of update and tokenwise part", "degree"),
    "angle_update_residual": ("angle of update and residual", "degree"),
    "angle_residual_tokenwise": ("angle of residual and tokenwise part", "degree"),
    "forced_cos_update_tokenwise": ("sqrt(1 - e^2): cosine that the residual's size forces", ""),
    "forced_cos_centred": ("the same for the centred cosine", ""),
    "forced_cos_update_residual": ("e: cosine that the residual's size forces", ""),
}  # fmt: skip
# the same where a dominant subspace of the reference is given
ENERGY_MEASURES = {
    "energy_update": ("share of the update's energy in the dominant tokenwise subspace", ""),
    "energy_tokenwise": ("share of the tokenwise part's energy in that subspace", ""),
    "energy_residual": ("share of the residual's energy in that subspace", ""),
}


def state_measures(state: np.ndarray, update: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``STATE_MEASURES`` of vectors along the last axis, stacked on a new last axis.

    Parameters
    ----------
    state, update : numpy.ndarray, shape (..., dim)
    mean : numpy.ndarray, shape (..., dim)
        Reference mean of the update.

    Returns
    -------
    numpy.ndarray of float32, shape (..., 6)
    """
    state, update = np.asarray(state, float), np.asarray(update, float)
    next_state = state + update
    along = cosine(next_state, state)
    measures = (
        norm(state), norm(next_state), norm(update), norm(update - mean), along, degrees(along),
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*measures), axis=-1).astype(np.float32)


def class_measures(
    state: np.ndarray,
    update: np.ndarray,
    tokenwise: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray,
) -> np.ndarray:
    """``CLASS_MEASURES`` of vectors along the last axis, stacked on a new last axis.

    Parameters
    ----------
    state, update, tokenwise : numpy.ndarray, shape (..., dim)
    mean : numpy.ndarray, shape (..., dim)
        Reference mean of the update.
    sd : numpy.ndarray, shape (..., dim)
        Reference standard deviation of each dim of the state after the block.

    Returns
    -------
    numpy.ndarray of float32, shape (..., 16)
    """
    state, update = np.asarray(state, float), np.asarray(update, float)
    tokenwise = np.asarray(tokenwise, float)
    residual = update - tokenwise
    centred = update - mean
    with np.errstate(divide="ignore", invalid="ignore"):
        standardized = norm(np.where(sd > 0, residual / sd, np.where(sd == 0, 0.0, np.nan)))
        size, update_norm, centred_norm = norm(residual), norm(update), norm(centred)
        error = np.where(update_norm > 0, size / update_norm, np.nan)
        error_centred = np.where(centred_norm > 0, size / centred_norm, np.nan)
        forced = np.where(error < 1, np.sqrt(np.maximum(1 - error**2, 0)), np.nan)
        forced_centred = np.where(
            error_centred < 1, np.sqrt(np.maximum(1 - error_centred**2, 0)), np.nan
        )
    along, across = cosine(update, tokenwise), cosine(update, residual)
    # an update of zero (identity) has no direction, also once the mean is taken off it
    along_centred = np.where(np.isnan(along), np.nan, cosine(centred, tokenwise - mean))
    forced_centred = np.where(np.isnan(along_centred), np.nan, forced_centred)
    between = cosine(residual, tokenwise)
    ahead = cosine(state + update, state + tokenwise)
    measures = (
        norm(tokenwise), size, standardized, error, along, along_centred,
        across, ahead, between, *(degrees(c) for c in (ahead, along, across, between)),
        forced, forced_centred, np.where(error < 1, error, np.nan),
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*measures), axis=-1).astype(np.float32)


def energy_measures(
    tokenwise: np.ndarray,
    update: np.ndarray,
    basis: np.ndarray,
    centre: np.ndarray,
    centre_update: np.ndarray,
) -> np.ndarray:
    """``ENERGY_MEASURES``: share ``|P v|^2 / |v|^2`` of each vector in the span of a basis.

    Parameters
    ----------
    tokenwise, update : numpy.ndarray, shape (..., n, dim)
    basis : numpy.ndarray, shape (..., 1, component, dim)
        Orthonormal rows; rows of zeros are none.
    centre, centre_update : numpy.ndarray, shape (..., 1, dim)
        Reference means of tokenwise part and update, zero for a subspace through the origin.

    Returns
    -------
    numpy.ndarray of float32, shape (..., n, 3)
        NaN for a vector of zeros, and where the basis has no row.
    """
    update = np.asarray(update, float) - centre_update
    tokenwise = np.asarray(tokenwise, float) - centre
    directions = np.swapaxes(np.asarray(basis, float)[..., 0, :, :], -1, -2)
    empty = ~np.any(directions, axis=(-1, -2))[..., None]
    shares = []
    for vectors in (update, tokenwise, update - tokenwise):
        total = norm(vectors) ** 2
        inside = norm(vectors @ directions) ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            shares.append(np.where((total > 0) & ~empty, inside / total, np.nan))
    return np.stack(np.broadcast_arrays(*shares), axis=-1).astype(np.float32)


def norm(vectors: np.ndarray) -> np.ndarray:
    """Euclidean norm along the last axis."""
    return np.sqrt(np.einsum("...d,...d->...", vectors, vectors))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine along the last axis; NaN where a vector is zero, since it has no direction."""
    norms = norm(a) * norm(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norms > 0, np.einsum("...d,...d->...", a, b) / norms, np.nan)


def degrees(cosines: np.ndarray) -> np.ndarray:
    """Angles in degrees of cosines that rounding may have put outside [-1, 1]."""
    return np.degrees(np.arccos(np.clip(cosines, -1, 1)))
