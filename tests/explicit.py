"""Every function class as its formula says, with d x d matrices in float64 and no cleverness."""

from __future__ import annotations

import numpy as np


def penalty(X, ridge, raw_mean):
    """lambda = rho tr(X X') / min(k, d) + 1e-6 |mean of the raw states|^2."""
    return ridge * np.sum(X**2) / min(X.shape) + 1e-6 * np.sum(raw_mean**2)


def linear(x, X, D, ridge):
    slope = np.linalg.solve(X.T @ X + penalty(X, ridge, X.mean(0)) * np.eye(X.shape[1]), X.T @ D)
    return x @ slope


def affine(x, X, D, ridge, weights=None):
    w = np.full(len(X), 1 / len(X)) if weights is None else np.asarray(weights, np.float64)
    mean_x, mean_d = w @ X, w @ D
    root = np.sqrt(w * len(X))[:, None]
    A, B = root * (X - mean_x), root * (D - mean_d)
    slope = np.linalg.solve(A.T @ A + penalty(A, ridge, mean_x) * np.eye(X.shape[1]), A.T @ B)
    return mean_d + (x - mean_x) @ slope


def diagonal(x, X, D, ridge):
    A, B = X - X.mean(0), D - D.mean(0)
    size = np.sum(A**2, 0)
    size = size + ridge * size.mean()
    slope = np.divide(np.sum(A * B, 0), size, out=np.zeros(len(size)), where=size > 0)
    return D.mean(0) + (x - X.mean(0)) * slope


def scalar(x, X, D, ridge):
    return x * np.sum(X * D) / (np.sum(X**2) * (1 + ridge))


def local_mean(x, X, D, ridge):
    return D.mean(0)


def low_rank(x, X, D, ridge, rank):
    """Reduced-rank ridge regression: the ridge fit projected on the fitted values' directions."""
    d = X.shape[1]
    slope = np.linalg.solve(X.T @ X + penalty(X, ridge, X.mean(0)) * np.eye(d), X.T @ D)
    # augmented rows turn ridge into least squares; its fitted values have this covariance
    vectors = np.linalg.eigh(D.T @ X @ slope)[1][:, ::-1][:, :rank]
    return x @ slope @ vectors @ vectors.T


def orthogonal(x, X, D, scale, mu):
    """T(x) - x with Q the orthogonal polar factor of Y'X + mu I, s inside the span only."""
    Y = X + D
    left, _, right = np.linalg.svd(Y.T @ X + mu * np.eye(X.shape[1]))
    Q = left @ right
    s = np.sum(Y * (X @ Q.T)) / np.sum(X**2) if scale else 1.0
    basis, sizes, _ = np.linalg.svd(np.concatenate([X, Y]).T, full_matrices=False)
    basis = basis[:, sizes > 1e-9 * sizes[0]]
    inside = basis @ (basis.T @ x)
    return s * Q @ inside + (x - inside) - x
