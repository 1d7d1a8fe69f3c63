"""How uncertain is a regression coefficient when rows of a cluster are dependent?

    V = M (sum_g X_g' A_g e_g e_g' A_g X_g) M,   M = (X'X)^-1,   A_g = (I - X_g M X_g')^(-1/2) for
    CR2

CR1 takes A_g = I and scales by G/(G-1) (n-1)/(n-p). With few clusters CR1 is too small; CR2 with
Satterthwaite degrees of freedom is what holds its level there.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

KINDS = ("CR1", "CR2")


def cluster_robust(
    x: np.ndarray, residual: np.ndarray, cluster: np.ndarray, kind: str = "CR2"
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of least-squares coefficients, and the degrees of freedom of each.

    Parameters
    ----------
    x
        Design, shape (n, p), full rank.
    residual, cluster
        Residuals and cluster labels, shape (n,).
    kind
        "CR1" (degrees of freedom G - 1) or "CR2" (Bell and McCaffrey; Satterthwaite's).

    Returns
    -------
    tuple of numpy.ndarray
        Covariance (p, p) and degrees of freedom (p,).

    Notes
    -----
    Pustejovsky and Tipton, *Journal of Business and Economic Statistics* 36, 2018 (R's
    clubSandwich, identity working model). The root of I - X_g M X_g' is never formed: with the
    thin decomposition X_g M^(1/2) = U S V' it is I + U ((1 - S^2)^(-1/2) - 1) U'.

    Examples
    --------
    >>> x = np.column_stack([np.ones(12), np.arange(12.0)])
    >>> residual = np.tile([1.0, -1.0, 0.5], 4)
    >>> covariance, df = cluster_robust(x, residual, np.repeat(np.arange(4), 3))
    >>> covariance.shape, bool((df < 4).all())
    ((2, 2), True)
    """
    _, code = np.unique(cluster, return_inverse=True)
    order = np.argsort(code, kind="stable")
    x, residual, code = x[order], residual[order], code[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(code)) + 1, [code.size]])
    (n, p), n_clusters = x.shape, starts.size - 1
    bread = np.linalg.inv(x.T @ x)
    if kind == "CR1":
        scores = np.add.reduceat(x * residual[:, None], starts[:-1], axis=0)
        factor = n_clusters / (n_clusters - 1) * (n - 1) / (n - p)
        covariance = factor * bread @ (scores.T @ scores) @ bread
        return covariance, np.full(p, n_clusters - 1.0)
    root = np.linalg.cholesky(bread)
    scores = np.empty((n_clusters, p))
    inner = np.empty((n_clusters, p))  # d_gj = p_gj' p_gj, p_gj = A_g X_g M e_j
    outer = np.empty((p, n_clusters, p))  # z_gj = X_g' p_gj
    for g, (first, last) in enumerate(pairwise(starts)):
        block = x[first:last]
        u, s, _ = np.linalg.svd(block @ root, full_matrices=False)
        left = 1 - s**2
        # a direction that one cluster alone determines leaves no residual: pseudo-inverse
        scale = np.where(left > 1e-10, 1 / np.sqrt(np.maximum(left, 1e-10)), 0.0) - 1
        adjusted = block + u @ (scale[:, None] * (u.T @ block))  # A_g X_g
        scores[g] = adjusted.T @ residual[first:last]
        projected = adjusted @ bread
        inner[g] = (projected**2).sum(axis=0)
        outer[:, g] = (block.T @ projected).T
    covariance = bread @ (scores.T @ scores) @ bread
    df = np.empty(p)
    for j in range(p):
        z = outer[j]
        share = np.einsum("gi,ij,gj->g", z, bread, z)
        gram = bread @ (z.T @ z)
        squares = np.sum(inner[:, j] ** 2) - 2 * inner[:, j] @ share + np.trace(gram @ gram)
        df[j] = np.sum(inner[:, j] - share) ** 2 / squares
    return covariance, df
