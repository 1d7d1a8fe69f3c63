"""What is left of the correlation of two columns when others are held fixed, in every resample?

    r(y, x | z) = S_yx / sqrt(S_yy S_xx),   S = R_aa - R_az R_zz^+ R_za,   a = (y, x)

R is the matrix of pairwise (rank) correlations of the resample, so a partial rank correlation is
the correlation of the residuals of ranks regressed on ranks. The semi-partial one leaves y whole
(S_yy = 1).
"""

from __future__ import annotations

import numpy as np

from geomstats_lm.statistics.biweight import resampled_biweight
from geomstats_lm.statistics.ranks import resampled_kendall, resampled_pearson, resampled_spearman

PAIRWISE = {
    "spearman": resampled_spearman,
    "kendall": resampled_kendall,
    "pearson": resampled_pearson,
    "biweight": resampled_biweight,
}


def resampled_correlation(
    columns: np.ndarray,
    cluster: np.ndarray,
    counts: np.ndarray,
    *,
    method: str = "spearman",
    semipartial: bool = False,
) -> np.ndarray:
    """Correlation of the first two columns given all others, in each resample of clusters.

    Parameters
    ----------
    columns
        Response, predictor, then any controls, without NaN, shape (n, 2 + n_controls).
    cluster, counts, method
        As in `geomstats_lm.statistics.ranks.resampled_spearman`; "spearman", "kendall", "pearson"
        or "biweight".
    semipartial
        Take the controls out of the predictor alone.

    Returns
    -------
    numpy.ndarray
        Shape (n_boot,), NaN where the resample is degenerate.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=500)
    >>> x, y = z + rng.normal(size=500), z + rng.normal(size=500)
    >>> one = np.ones((1, 1), dtype=np.int16)
    >>> cluster = np.zeros(500, dtype=int)
    >>> raw = resampled_correlation(np.stack([y, x], 1), cluster, one)[0]
    >>> given_z = resampled_correlation(np.stack([y, x, z], 1), cluster, one)[0]
    >>> bool(raw > 0.3), bool(abs(given_z) < 0.1)
    (True, True)
    """
    pairwise = PAIRWISE[method]
    width = columns.shape[1]
    if width == 2:
        return pairwise(columns[:, 1], columns[:, 0], cluster, counts)
    matrix = np.broadcast_to(np.eye(width), (counts.shape[1], width, width)).copy()
    for i in range(width):
        for j in range(i + 1, width):
            value = pairwise(columns[:, i], columns[:, j], cluster, counts)
            matrix[:, i, j] = matrix[:, j, i] = value
    return partial_from_matrix(matrix, semipartial=semipartial)


def partial_from_matrix(matrix: np.ndarray, *, semipartial: bool = False) -> np.ndarray:
    """Partial correlation of variables 0 and 1 given the rest, from matrices (..., k, k)."""
    constant = np.isnan(matrix[..., 0, 1])
    # a control that is constant in a resample explains nothing there
    matrix = np.nan_to_num(matrix, nan=0.0)
    across = matrix[..., :2, 2:]
    inner = np.linalg.pinv(matrix[..., 2:, 2:], rcond=1e-12, hermitian=True)
    left = matrix[..., :2, :2] - across @ inner @ np.swapaxes(across, -1, -2)
    spread_y = np.ones(left.shape[:-2]) if semipartial else left[..., 0, 0]
    spread_x = left[..., 1, 1]
    # a response or predictor that the controls explain in full leaves rounding noise, not a
    # correlation
    usable = (spread_y > 1e-10) & (spread_x > 1e-10) & ~constant
    scale = np.sqrt(np.where(usable, spread_y * spread_x, 1.0))
    return np.where(usable, np.clip(left[..., 0, 1] / scale, -1.0, 1.0), np.nan)


def correlation_of_rows(
    values: np.ndarray, *, method: str = "spearman", semipartial: bool = False
) -> np.ndarray:
    """The same correlation for many small tables at once: values (n_tables, n, k) -> (n_tables,).

    Tables with fewer than two complete rows, or a NaN, give NaN.
    """
    n_tables, n, width = values.shape
    result = np.full(n_tables, np.nan)
    if n < 2:
        return result
    usable = ~np.isnan(values).any(axis=(1, 2))
    one, cluster = np.ones((1, 1), np.int16), np.zeros(n, np.int32)
    if method in ("spearman", "pearson"):
        from scipy.stats import rankdata

        table = values[usable]
        if method == "spearman":
            table = rankdata(table, axis=1)
        elif not np.isfinite(table).all():
            return result
        centred = table - table.mean(axis=1, keepdims=True)
        gram = np.swapaxes(centred, 1, 2) @ centred
        variance = np.einsum("tii->ti", gram)
        positive = variance > 1e-24 * np.maximum((table**2).sum(axis=1), 1e-300)
        scale = np.sqrt(np.where(positive, variance, np.nan))
        matrix = gram / scale[:, :, None] / scale[:, None, :]
        matrix = np.clip(matrix, -1.0, 1.0)
        result[usable] = (
            matrix[:, 0, 1] if width == 2 else partial_from_matrix(matrix, semipartial=semipartial)
        )
        return result
    for row in np.flatnonzero(usable):
        result[row] = resampled_correlation(
            values[row], cluster, one, method=method, semipartial=semipartial
        )[0]
    return result
