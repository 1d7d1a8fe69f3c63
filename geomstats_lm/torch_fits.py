"""How are the local maps fitted on an accelerator, many tokens at once?

The same closed forms as the compiled kernels in batched torch operations, with eigendecompositions
in the place of Cholesky factors; ``w = (K + lambda I)^-1 X x`` and ``D_hat = D' w``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from geomstats_lm.class_labels import FunctionClass, ridge_of

AT_ONCE = 2**26  # entries of the gathered neighbours (tokens x k x d)


def fit(
    classes: Sequence[FunctionClass],
    data: Any,
    weights: np.ndarray,
    ridges: Mapping[str, float],
    *,
    target: str,
    device: str,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Predictions of local classes that share neighbours and weights.

    Parameters
    ----------
    classes : sequence of FunctionClass
    data : Neighbourhoods
    weights : numpy.ndarray of float32, shape (n, k)
    ridges : mapping of label to float
    target : {"update", "state"}
    device : str
        Any torch device.

    Returns
    -------
    predictions : numpy.ndarray of float32, shape (classes, n, d)
    effective_df : numpy.ndarray of float32, shape (classes, n)
    reconstructed : dict of label to numpy.ndarray, shape (n, d)
    """
    place = torch.device(device)
    n, d = data.queries.shape
    k = data.neighbours.shape[1]
    states, targets = (torch.from_numpy(a).to(place) for a in (data.states, data.targets))
    centre = torch.from_numpy(data.centre).to(place)
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    df = np.empty((len(classes), n), dtype=np.float32)
    left = {c.label: np.empty((n, d), np.float32) for c in classes if c.scope == "global+local"}
    run = max(1, AT_ONCE // (k * d))
    for start in range(0, n, run):
        part = slice(start, start + run)
        rows = torch.from_numpy(data.neighbours[part]).to(place)
        near = _Batch(
            torch.from_numpy(data.queries[part]).to(place), states[rows], targets[rows],
            torch.from_numpy(weights[part]).to(place), centre,
        )  # fmt: skip
        for c, cls in enumerate(classes):
            rho = float(np.nan_to_num(ridge_of(cls, ridges)))
            predicted, of_class, combination = near.predict(cls, rho, target)
            predictions[c, part] = predicted.float().cpu().numpy()
            df[c, part] = of_class.float().cpu().numpy()
            if cls.label in left:
                rebuilt = torch.einsum("bk,bkd->bd", combination.float(), states[rows] + centre)
                left[cls.label][part] = rebuilt.cpu().numpy()
    return predictions, df, left


class _Batch:
    """Neighbourhoods of some tokens, with what several classes share computed once."""

    def __init__(self, x: Any, X: Any, D: Any, weights: Any, centre: Any) -> None:
        self.weights, self.D = weights, D
        self.k, self.d = X.shape[1:]
        mean = torch.einsum("bk,bkd->bd", weights, X)
        self.root = (weights * self.k).sqrt()
        self.X = self.root[..., None] * (X - mean[:, None])
        self.offset = x - mean
        self.raw_mean = mean + centre
        self.raw_x = x + centre
        wide = self.X.double() if self.k > self.d else self.X
        self.gram = (wide @ wide.mT).double()
        self.along_x = torch.einsum("bkd,bd->bk", wide, self.offset.to(wide)).double()
        self.along_mean = torch.einsum("bkd,bd->bk", wide, self.raw_mean.to(wide)).double()
        self.square = self.raw_mean.double().square().sum(-1)
        self.solved: dict[tuple[bool, float], Any] = {}

    def predict(self, cls: FunctionClass, rho: float, target: str) -> tuple[Any, Any, Any]:
        """(b, d) predictions, (b,) degrees of freedom, (b, k) weights on the targets."""
        b = len(self.raw_x)
        combination = self.weights.double()
        df = torch.ones(b, dtype=torch.float64, device=self.raw_x.device)
        if cls.name == "diagonal":
            return (*self._diagonal(rho), combination)
        if cls.name == "scalar":
            raw = self.X.double() + self.root[..., None] * self.raw_mean[:, None]
            cross = torch.einsum("bkd,bkd->b", raw, self.root[..., None] * self.D.double())
            size = raw.square().sum((1, 2)) * (1 + rho)
            slope = torch.where(size > 0, cross / size.clamp_min(1e-300), 0.0)
            return slope[:, None] * self.raw_x, df / ((1 + rho) * self.d), combination
        if cls.name == "orthogonal":
            return self._orthogonal(bool(cls["scale"]), target)
        if cls.name != "local_mean":
            w, trace, hat = self._system(cls.name == "affine", rho)
            root = self.root.double()
            if cls.name == "low_rank":
                rank = min(cls["rank"], self.k)
                combination = root * self._low_rank(w, hat, rank)
                kept = trace.clamp_max(rank)
                df = kept * (trace + self.d - kept) / self.d
            else:
                combination, df = root * w, trace
            if cls.name == "affine":
                rest = 1 - combination.sum(1, keepdim=True)
                combination, df = combination + self.weights.double() * rest, 1 + trace
        return torch.einsum("bk,bkd->bd", combination.float(), self.D), df, combination

    def _system(self, centred: bool, rho: float) -> tuple[Any, Any, Any]:
        """w, tr M and M = K (K + lambda I)^-1."""
        if (centred, rho) not in self.solved:
            gram, right = self.gram, self.along_x
            if not centred:
                root = self.root.double()
                mixed = root[:, :, None] * self.along_mean[:, None, :]
                outer = root[:, :, None] * root[:, None, :]
                gram = gram + mixed + mixed.mT + outer * self.square[:, None, None]
                mean_offset = (self.raw_mean.double() * self.offset.double()).sum(-1)
                right = right + self.along_mean + root * (mean_offset + self.square)[:, None]
            trace = gram.diagonal(dim1=1, dim2=2).sum(1)
            penalty = rho * trace / min(self.k, self.d) + 1e-6 * self.square
            values, vectors = torch.linalg.eigh(gram)
            total = values.clamp_min(0) + penalty[:, None]
            usable = total > 1e-13 * total[:, -1:]
            inverse = torch.where(usable, 1 / total.clamp_min(1e-300), 0.0)
            w = torch.einsum("bij,bj,bkj,bk->bi", vectors, inverse, vectors, right)
            share = values.clamp_min(0) * inverse
            hat = (vectors * share[:, None]) @ vectors.mT
            self.solved[centred, rho] = w, share.sum(1), (hat, vectors, share)
        return self.solved[centred, rho]

    def _diagonal(self, rho: float) -> tuple[Any, Any]:
        mean = torch.einsum("bk,bkd->bd", self.weights, self.D)
        cross = (self.X * (self.root[..., None] * (self.D - mean[:, None]))).sum(1)
        variation = self.X.square().sum(1)
        size = variation + rho * variation.mean(1, keepdim=True)
        safe = size.clamp_min(1e-38)
        slope = torch.where(size > 0, cross / safe, 0.0)
        df = 1 + torch.where(size > 0, variation / safe, 0.0).mean(1)
        return mean + self.offset * slope, df

    def _low_rank(self, w: Any, hat: Any, rank: int) -> Any:
        _, vectors, share = hat
        root = vectors * share.sqrt()[:, None]  # M = root root'
        D = self.root[..., None] * self.D
        gram = (D @ D.mT).double()
        values, directions = torch.linalg.eigh(root.mT @ gram @ root)
        values, directions = values[:, -rank:], directions[:, :, -rank:]
        seen = (directions.mT @ (root.mT @ (gram @ w[..., None])))[..., 0]
        usable = (values > 1e-10 * values[:, -1:]) & (values > 0)
        seen = torch.where(usable, seen / values.clamp_min(1e-300), 0.0)
        return (root @ (directions @ seen[..., None]))[..., 0]

    def _orthogonal(self, scale: bool, target: str) -> tuple[Any, Any, Any]:
        """Bases E_X, E_Y from eigenvectors, then as in the compiled kernel."""
        x = self.raw_x.double()
        X = self.X.double() + self.root[..., None].double() * self.raw_mean[:, None].double()
        Y = self.root[..., None].double() * self.D.double()
        if target == "update":
            Y = Y + X
        basis_x, root_x = _basis(X)
        basis_y, root_y = _basis(Y)
        left, singular, right = torch.linalg.svd(root_y.mT @ root_x)
        kept = singular > 1e-7 * singular[:, :1].clamp_min(1e-300)
        turn = (left * kept[:, None]) @ right  # E_Y' turn E_X
        turned = turn.mT @ basis_y  # F
        xi = _times(basis_x, x)
        overlap = turned @ basis_x.mT
        seen = _times(turned, x) - _times(overlap, xi)
        values, vectors = torch.linalg.eigh(overlap @ overlap.mT)
        cosine = values.clamp_min(0).sqrt().clamp_min(1e-8)
        z = _times(vectors, _times(vectors.mT, seen) / (cosine * (1 + cosine)))
        y = x - _times(basis_x.mT, xi) + _times(turned.mT, z)
        y = y - _times(basis_x.mT, _times(overlap.mT, z))
        mapped = _times(turned.mT, xi) + y - _times(turned.mT, _times(turned, y))
        if scale:
            size = X.square().sum((1, 2))
            s = torch.where(size > 0, singular.sum(1) / size.clamp_min(1e-300), 1.0)[:, None]
            both = _basis(torch.cat([basis_x, basis_y], 1))[0]
            outside = x - _times(both.mT, _times(both, x))
            mapped = s * mapped + (1 - s) * outside
        m = min(self.k, self.d)
        df = torch.full((len(x),), (m * self.d - m * (m + 1) / 2 + scale) / self.d)
        return mapped - x if target == "update" else mapped, df, self.weights


def _basis(rows: Any) -> tuple[Any, Any]:
    """E with orthonormal (or zero) rows and C with rows = C E."""
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    usable = values > 1e-10 * values[:, -1:].clamp_min(1e-300)
    size = torch.where(usable, values, 0.0).clamp_min(0).sqrt()
    inverse = torch.where(usable, 1 / size.clamp_min(1e-300), 0.0)
    return inverse[..., None] * (vectors.mT @ rows), vectors * size[:, None]


def _times(matrix: Any, vector: Any) -> Any:
    return (matrix @ vector[..., None])[..., 0]
