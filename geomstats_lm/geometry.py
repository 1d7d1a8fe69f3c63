"""How are the update, its tokenwise part and the residual placed to one another?

Norms, cosines and angles of ``D = t + r``, each beside the value that the size of the residual
forces by itself: with ``e = |r| / |D|`` and a right angle between r and t,
``cos(D, t) = sqrt(1 - e^2)`` and ``cos(D, r) = e``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm.cube import ordered, settings_of, write_leaf

TOKENS_PER_CHUNK = 1 << 16  # per-token numbers are small: one file holds many runs

CARRIED = (
    "n_reference", "n_reference_excluded_massive", "neighbour_distance", "same_token_fraction",
    "effective_df",
)  # fmt: skip

# name -> (long name, units), of what belongs to a token whatever the function class
STATE_MEASURES = {
    "state_norm": ("norm of the state before the block", ""),
    "next_state_norm": ("norm of the state after the block", ""),
    "update_norm": ("norm of the update", ""),
    "update_centred_norm": ("norm of the update less its reference mean", ""),
    "cos_next_state_state": ("cosine of the states after and before the block", ""),
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
    "angle_update_tokenwise": ("angle of update and tokenwise part", "degree"),
    "angle_update_residual": ("angle of update and residual", "degree"),
    "angle_residual_tokenwise": ("angle of residual and tokenwise part", "degree"),
    "forced_cos_update_tokenwise": ("sqrt(1 - e^2): cosine that the residual's size forces", ""),
    "forced_cos_centred": ("the same for the centred cosine", ""),
    "forced_cos_update_residual": ("e: cosine that the residual's size forces", ""),
}


def geometry(
    data: xr.DataTree | xr.Dataset,
    *,
    exclude: bool = True,
    store: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Measure the geometry of a decomposition.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or what :func:`decompose` returned: ``update`` and ``state``
        (model, layer, token, dim), ``tokenwise`` (model, function_class, layer, token, dim).
    exclude : bool
        NaN at tokens that are left out of statistics: the first of a window, special ones, and
        those massive at the layer.  ``usable`` tells which either way.
    store : str or Path, optional
        Study to write the leaf ``geometry`` to.
    overwrite : bool
        Replace a geometry that was made from another decomposition.
    progress : bool
        Show a progress bar while writing.

    Returns
    -------
    xarray.Dataset
        Lazy.  Per token (model, [function_class,] layer, token): norms, ``relative_error``,
        cosines, angles in degrees, and the ``forced_*`` values (NaN where e >= 1: they do not
        exist there).  Per layer (model, function_class, layer): ``explained`` and
        ``r2_centred``, ``n`` and counts of tokens left out.  Sums are in float64.

    Raises
    ------
    ValueError
        If a variable that is needed is missing.

    Notes
    -----
    ``explained = 1 - sum |r|^2 / sum |D|^2`` and
    ``r2_centred = 1 - sum |r|^2 / sum |D - mean D|^2``, sums over usable evaluation tokens, the
    mean over reference tokens.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> dims = ("model", "layer", "token", "dim")
    >>> update = xr.DataArray(np.ones((1, 1, 2, 4)), dims=dims)
    >>> tokenwise = 0.5 * update.expand_dims(function_class=["half"])
    >>> data = xr.Dataset({"update": update, "state": update, "tokenwise": tokenwise})
    >>> geometry(data).relative_error.values.ravel()
    array([0.5, 0.5], dtype=float32)
    """
    decomposition = _decomposition_of(data)
    single = decomposition["update"].chunks is None
    lazy = decomposition.chunk({"dim": -1})
    usable = usable_tokens(lazy)
    mean, sd = _reference(lazy, "reference_update_mean", 0.0), _reference(
        lazy, "reference_state_sd", np.nan
    )  # fmt: skip
    measured = {
        **_measure(state_measures, STATE_MEASURES, [lazy.state, lazy["update"], mean]),
        **_measure(
            class_measures, CLASS_MEASURES, [lazy.state, lazy["update"], lazy.tokenwise, mean, sd]
        ),
    }
    counted = {name: values.where(usable) for name, values in measured.items()}
    residual = (counted["residual_norm"].astype(float) ** 2).sum("token")
    totals = {
        name: (counted[name].astype(float) ** 2).sum("token")
        for name in ("update_norm", "update_centred_norm")
    }
    layered = {
        "explained": 1 - residual / totals["update_norm"].where(totals["update_norm"] > 0),
        "r2_centred": 1
        - residual / totals["update_centred_norm"].where(totals["update_centred_norm"] > 0),
        "n": usable.sum("token"),
        "n_massive": lazy.is_massive.sum("token")
        if "is_massive" in lazy
        else 0 * usable.sum("token"),
        "n_error_above_one": (counted["relative_error"] >= 1).sum("token"),
    }
    # what tells how far a fit can be trusted goes along: N beside every error, and its distances
    kept = {n: v for n, v in lazy.data_vars.items() if n in CARRIED}
    result = xr.Dataset({**(counted if exclude else measured), "usable": usable, **layered, **kept})
    result = result.assign_coords(
        {n: c for n, c in decomposition.coords.items() if n not in result.coords}
    )
    for name, (text, units) in {**STATE_MEASURES, **CLASS_MEASURES}.items():
        result[name].attrs = {"long_name": text, **({"units": units} if units else {})}
    settings = {"exclude": exclude, "decomposition": settings_of(decomposition)}
    result = result.map(lambda v: v.transpose(*ordered(v.dims)), keep_attrs=True)
    result.attrs = {k: v for k, v in decomposition.attrs.items() if k != "settings"}
    result = result.chunk({"token": _run(decomposition), **_whole(result, "function_class")})
    if store is not None:
        key = str(result.model.values[0])
        return write_leaf(
            result, store, key, "geometry", settings=settings, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    return result.compute() if single else result


def usable_tokens(data: xr.Dataset) -> xr.DataArray:
    """Tokens that statistics count: not first in their window, not special, not massive.

    Parameters
    ----------
    data : xarray.Dataset
        With token coordinates ``position`` and ``is_special`` and, if there, the variable
        ``is_massive`` (model, layer, token).

    Returns
    -------
    xarray.DataArray of bool, dims (model, layer, token)
    """
    template = data["update"].isel(dim=0, drop=True) if "update" in data else data["is_massive"]
    usable = xr.ones_like(template, dtype=bool)
    if "position" in data.coords:
        usable = usable & (data.position > 0)
    if "is_special" in data.coords:
        usable = usable & ~data.is_special
    if "is_massive" in data:
        usable = usable & ~data.is_massive
    return usable.transpose("model", "layer", "token")


def state_measures(state: np.ndarray, update: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``STATE_MEASURES`` of vectors along the last axis, stacked on a new last axis.

    Parameters
    ----------
    state, update : numpy.ndarray, shape (..., dim)
    mean : numpy.ndarray, shape (..., dim)
        Reference mean of the update.

    Returns
    -------
    numpy.ndarray of float32, shape (..., 5)
    """
    state, update = np.asarray(state, float), np.asarray(update, float)
    next_state = state + update
    measures = (
        _norm(state), _norm(next_state), _norm(update), _norm(update - mean),
        _cosine(next_state, state),
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
    numpy.ndarray of float32, shape (..., 14)
    """
    state, update = np.asarray(state, float), np.asarray(update, float)
    tokenwise = np.asarray(tokenwise, float)
    residual = update - tokenwise
    centred = update - mean
    with np.errstate(divide="ignore", invalid="ignore"):
        standardized = _norm(np.where(sd > 0, residual / sd, np.where(sd == 0, 0.0, np.nan)))
        size, update_norm, centred_norm = _norm(residual), _norm(update), _norm(centred)
        error = np.where(update_norm > 0, size / update_norm, np.nan)
        error_centred = np.where(centred_norm > 0, size / centred_norm, np.nan)
        forced = np.where(error < 1, np.sqrt(np.maximum(1 - error**2, 0)), np.nan)
        forced_centred = np.where(
            error_centred < 1, np.sqrt(np.maximum(1 - error_centred**2, 0)), np.nan
        )
    along, across = _cosine(update, tokenwise), _cosine(update, residual)
    # an update of zero (identity) has no direction, also once the mean is taken off it
    along_centred = np.where(np.isnan(along), np.nan, _cosine(centred, tokenwise - mean))
    forced_centred = np.where(np.isnan(along_centred), np.nan, forced_centred)
    angle_rt = _cosine(residual, tokenwise)
    measures = (
        _norm(tokenwise), size, standardized, error, along, along_centred,
        across, _cosine(state + update, state + tokenwise),
        *(np.degrees(np.arccos(np.clip(c, -1, 1))) for c in (along, across, angle_rt)),
        forced, forced_centred, np.where(error < 1, error, np.nan),
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*measures), axis=-1).astype(np.float32)


def _norm(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("...d,...d->...", vectors, vectors))


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine along the last axis; NaN where a vector is zero, since it has no direction."""
    norms = _norm(a) * _norm(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norms > 0, np.einsum("...d,...d->...", a, b) / norms, np.nan)


def _measure(function: Any, names: dict[str, Any], arrays: list[xr.DataArray]) -> dict[str, Any]:
    stacked = xr.apply_ufunc(
        function,
        *arrays,
        input_core_dims=[["dim"]] * len(arrays),
        output_core_dims=[["measure"]],
        dask="parallelized",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"measure": len(names)}},
    )
    return {name: stacked.isel(measure=i) for i, name in enumerate(names)}


def _decomposition_of(data: xr.DataTree | xr.Dataset) -> xr.Dataset:
    if isinstance(data, xr.DataTree):
        if "decomposition" not in data.children:
            raise ValueError(
                f"data: node {data.path} has no decomposition, only {list(data.children)}; "
                "run decompose() with the same store first"
            )
        data = data["decomposition"].to_dataset()
    missing = [name for name in ("state", "update", "tokenwise") if name not in data]
    if missing:
        raise ValueError(f"data: variables {missing} are missing; there are {list(data)}")
    return data


def _reference(data: xr.Dataset, name: str, default: float) -> xr.DataArray:
    if name in data:
        return data[name]
    return xr.full_like(data["update"].isel(token=0, drop=True), default, dtype=float)


def _run(decomposition: xr.Dataset) -> int:
    """Tokens per chunk: whole runs of the decomposition, at most ``TOKENS_PER_CHUNK``."""
    n_tokens = decomposition.sizes["token"]
    run = decomposition["update"].variable.chunksizes.get("token", (n_tokens,))[0]
    return min(n_tokens, max(run, TOKENS_PER_CHUNK // run * run)) or 1


def _whole(data: xr.Dataset, dim: str) -> dict[str, int]:
    return {dim: -1} if dim in data.dims else {}
