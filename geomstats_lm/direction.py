"""What does the direction of the residual go with?

Shares of the variance of ``u = r/|r|`` over tokens: what is common to all, ``|mean u|^2``, and what
of the rest goes with token id, position or the state's norm, ``1 - within / total``.
"""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from geomstats_lm.geometry import decomposition_of, usable_tokens

SOURCES = ("common", "token_id", "position", "state_norm")
NORM_GROUPS = 10


def residual_direction(data: xr.DataTree | xr.Dataset) -> xr.Dataset:
    """How much of the residual's direction is common, or goes with what is known of the token.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or a decomposition with the token coordinates ``token_id`` and
        ``position``.

    Returns
    -------
    xarray.Dataset
        Lazy, (model, function_class, source, layer) with source ``common``, ``token_id``,
        ``position`` and ``state_norm`` (tenths of the norms): ``share`` of variance,
        ``share_forced``, its mean where directions are random, ``share_adjusted``, which is then 0
        on average, and ``n_groups``; and ``n`` (model, function_class, layer), the usable tokens
        that have a residual.

    Raises
    ------
    ValueError
        If a variable or coordinate is missing.

    Notes
    -----
    ``share_forced`` is 1/n for the common part and (G - 1)/(n - 1) for G groups;
    ``share_adjusted = (share - share_forced) / (1 - share_forced)`` (Ezekiel's adjusted R²).

    Examples
    --------
    >>> dims = ("model", "layer", "token", "dim")
    >>> update = xr.DataArray(np.tile([1.0, 2.0], (1, 1, 6, 1)), dims=dims)
    >>> data = xr.Dataset(
    ...     {"update": update, "state": update,
    ...      "tokenwise": 0 * update.expand_dims(function_class=["identity"])},
    ...     {"token_id": ("token", [1, 1, 2, 2, 3, 3]), "position": ("token", np.arange(1, 7))},
    ... )
    >>> round(residual_direction(data).share.sel(source="common").item(), 6)
    1.0
    """
    decomposition = decomposition_of(data)
    missing = [n for n in ("token_id", "position") if n not in decomposition.coords]
    if missing:
        raise ValueError(f"data: token coordinates {missing} are missing")
    single = decomposition["update"].chunks is None
    usable = usable_tokens(decomposition)
    labels = {n: decomposition[n].values for n in ("token_id", "position")}
    model, classes, layers = (
        range(decomposition.sizes[d]) for d in ("model", "function_class", "layer")
    )
    cells = []
    for m in model:
        for c in classes:
            for i in layers:
                at = {"model": m, "layer": i}
                arrays = [
                    decomposition.state.isel(at).data,
                    decomposition["update"].isel(at).data,
                    decomposition.tokenwise.isel(at | {"function_class": c}).data
                    if "function_class" in decomposition.tokenwise.dims
                    else decomposition.tokenwise.isel(at).data,
                    usable.isel(at).data,
                ]
                cell = dask.delayed(_cell)(*arrays, labels)
                cells.append(da.from_delayed(cell, (len(SOURCES) + 1, 4), float))
    shape = (len(model), len(classes), len(layers), len(SOURCES) + 1, 4)
    table = da.stack(cells).reshape(shape)
    dims = ("model", "function_class", "source", "layer")
    result: dict[str, Any] = {
        name: (dims, table[..., :-1, i].transpose(0, 1, 3, 2))
        for i, name in enumerate(("share", "share_forced", "share_adjusted", "n_groups"))
    }
    result["n"] = (("model", "function_class", "layer"), table[..., -1, 0])
    coords: dict[str, Any] = {
        str(n): c for n, c in decomposition.coords.items() if "token" not in c.dims
    }
    found = xr.Dataset(result, {**coords, "source": list(SOURCES)})
    return found.compute() if single else found


def direction_shares(directions: np.ndarray, groups: dict[str, np.ndarray]) -> np.ndarray:
    """Share, its forced value, the adjusted share and the number of groups, per source.

    Parameters
    ----------
    directions : numpy.ndarray, shape (n, dim)
        Vectors of length one.
    groups : dict of numpy.ndarray, shape (n,)
        Labels; the share is of what is left when the mean direction is taken off.

    Returns
    -------
    numpy.ndarray of float64, shape (1 + len(groups), 4)
        The common part first.
    """
    n = len(directions)
    rows = np.full((1 + len(groups), 4), np.nan)
    if n < 3:
        return rows
    mean = directions.mean(axis=0)
    common = float(mean @ mean)
    rows[0] = common, 1 / n, (common - 1 / n) / (1 - 1 / n), 1
    total = n * (1 - common)
    for row, labels in enumerate(groups.values(), start=1):
        _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(sizes), directions.shape[1]))
        np.add.at(sums, codes, directions)
        between = float((np.einsum("gd,gd->g", sums, sums) / sizes).sum()) - n * common
        forced = (len(sizes) - 1) / (n - 1)
        rows[row, 3] = len(sizes)
        if total > 1e-12 * n:
            share = between / total
            # as many groups as tokens explain everything and say nothing
            adjusted = (share - forced) / (1 - forced) if forced < 1 else np.nan
            rows[row, :3] = share, forced, adjusted
    return rows


def norm_groups(norms: np.ndarray, number: int = NORM_GROUPS) -> np.ndarray:
    """Codes of equally large groups of tokens by norm."""
    edges = np.quantile(norms, np.arange(1, number) / number) if len(norms) else []
    return np.searchsorted(edges, norms, side="right")


def _cell(
    state: np.ndarray, update: np.ndarray, tokenwise: np.ndarray, usable: np.ndarray,
    labels: dict[str, np.ndarray],
) -> np.ndarray:  # fmt: skip
    residual = np.asarray(update, float) - np.asarray(tokenwise, float)
    size = np.linalg.norm(residual, axis=1)
    kept = np.asarray(usable) & (size > 0)
    norms = np.linalg.norm(np.asarray(state, float)[kept], axis=1)
    groups = {n: v[kept] for n, v in labels.items()} | {"state_norm": norm_groups(norms)}
    shares = direction_shares(residual[kept] / size[kept, None], groups)
    return np.concatenate([shares, [[kept.sum(), 0, 0, 0]]])
