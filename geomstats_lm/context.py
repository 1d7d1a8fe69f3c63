"""How much of a residual is context, and how much is misfit?

The block run on the token alone gives ``D = o + c``, c what context adds; the residual of a class
is then ``r = c + (o - t)``, and ``<r, c>/|r|^2 + <r, o - t>/|r|^2 = 1`` are the shares of context
and misfit.
"""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from geomstats_lm import subspaces
from geomstats_lm.geometry import decomposition_of, labelled_like, usable_tokens
from geomstats_lm.geometry_measures import cosine, norm
from geomstats_lm.layer_means import cluster_means
from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts
from geomstats_lm.statistics.results import Result

ORACLE = "self_only"
MEASURES = {
    "context_norm": "norm of what context adds to the update",
    "misfit_norm": "norm of the block's own tokenwise part less the class's",
    "residual_norm": "norm of the residual",
    "share_context": "share of the residual that lies along the context part",
    "cos_residual_context": "cosine of residual and context part",
    "cos_context_misfit": "cosine of context part and misfit",
}


def context(
    data: xr.DataTree | xr.Dataset,
    *,
    model: Any = None,
    m: int = 16,
    exclude: bool = True,
) -> xr.Dataset:
    """Split every class's residual into what context adds and what the class misses.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or a decomposition.  Its class ``self_only`` is the oracle.
    model : LanguageModel, optional
        Runs its blocks on single tokens where that class is not there.
    m : int
        Dimensions of the dominant subspaces of residual and context part.
    exclude : bool
        NaN at tokens that are left out of statistics.

    Returns
    -------
    xarray.Dataset
        Lazy.  Per token (model, function_class, layer, token): ``context_norm``, ``misfit_norm``,
        ``residual_norm``, ``share_context`` (the rest to 1 is misfit; outside [0, 1] where the two
        cancel), ``cos_residual_context``, ``cos_context_misfit``.  Per layer ``context_of_update``
        = sum |c|^2 / sum |D|^2, ``overlap_residual_context``, the mean squared cosine of the
        principal angles of the top-m subspaces, and ``chance_overlap`` = m/d.

    Raises
    ------
    ValueError
        If there is neither the class ``self_only`` nor a model.

    Notes
    -----
    The two subspaces are those of the very tokens measured: their overlap is a description.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node, load_example
    >>> model = load_example("gpt2")
    >>> split = context(example_node(model=model), model=model, m=4)
    >>> "share_context" in split
    True
    """
    decomposition = decomposition_of(data)
    single = decomposition["update"].chunks is None
    lazy = decomposition.chunk({"dim": -1})
    oracle = _oracle(lazy, model)
    usable = usable_tokens(lazy)
    stacked = xr.apply_ufunc(
        context_measures,
        lazy.tokenwise, lazy["update"], oracle,
        input_core_dims=[["dim"]] * 3,
        output_core_dims=[["measure"]],
        dask="parallelized",
        join="exact",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"measure": len(MEASURES)}},
    )  # fmt: skip
    counted = stacked.where(usable)
    kept = counted if exclude else stacked
    result = xr.Dataset({n: kept.isel(measure=i) for i, n in enumerate(MEASURES)})
    added = (lazy["update"] - oracle).astype(float)
    sums = [
        ((v.astype(float) ** 2).sum("dim").where(usable)).sum("token")
        for v in (added, lazy["update"])
    ]
    result["context_of_update"] = sums[0] / sums[1].where(sums[1] > 0)
    result["usable"] = usable
    result = result.assign(_overlaps(lazy, oracle, usable, m))
    result = labelled_like(decomposition, result, MEASURES)
    return result.compute() if single else result


def context_summary(
    measured: xr.Dataset,
    *,
    cluster: str = "document",
    n_boot: int = 999,
    level: float = 0.95,
    interval: str = "bootstrap-t",
    seed: int = 0,
) -> Result:
    """Shares of context and misfit in each class's residual, per layer, with intervals.

    Parameters
    ----------
    measured : xarray.Dataset
        From :func:`context`.
    cluster : str
        Token coordinate whose levels are drawn whole.
    n_boot, level, interval, seed
        As for :func:`geometry_summary`.

    Returns
    -------
    Result
        ``tidy()`` has two rows (``part`` context and misfit) per model, class and layer, with
        ``estimate`` = sum <r, part> / sum |r|^2.

    Raises
    ------
    ValueError
        If the coordinate is missing.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node, load_example
    >>> model = load_example("gpt2")
    >>> split = context(example_node(model=model), model=model, m=4)
    >>> sorted(set(context_summary(split, n_boot=99).tidy()["part"]))
    ['context', 'misfit']
    """
    if cluster not in measured.coords:
        raise ValueError(f"cluster={cluster!r} is no coordinate; there are {list(measured.coords)}")
    data = measured[["share_context", "residual_norm", "usable"]].compute()
    labels, codes = np.unique(data[cluster].values, return_inverse=True)
    rows = []
    for model in np.atleast_1d(data.model.values):
        counts = draw_counts(len(labels), n_boot, seed=seed, label=str(model))
        for label in data.function_class.values:
            one = data.sel(model=model, function_class=label).where(data.usable.sel(model=model))
            shares = one.share_context.transpose("layer", "token").values.astype(float)
            weights = one.residual_norm.transpose("layer", "token").values.astype(float) ** 2
            for part, values in (("context", shares), ("misfit", 1 - shares)):
                found = _pooled(values, weights, codes, counts, level, interval)
                for layer, row in zip(one.layer.values, found):
                    rows.append(
                        {"model": model, "function_class": label, "layer": layer, "part": part,
                         **row}
                    )  # fmt: skip
    frame = pd.DataFrame(rows)
    return Result(
        title="Context and misfit in the residual",
        estimates=frame,
        fits=frame.groupby(["model", "function_class", "part"], sort=False)
        .agg(n_layers=("layer", "size"), mean=("estimate", "mean"))
        .reset_index(),
        settings={"cluster": cluster, "interval": interval, "level": level, "n_boot": n_boot,
                  "seed": seed},
        observations=lambda: measured[list(MEASURES)].to_dataframe().reset_index(),
        notes=["Shares add up to 1; one may be negative where context and misfit cancel."],
    )  # fmt: skip


def context_measures(tokenwise: np.ndarray, update: np.ndarray, oracle: np.ndarray) -> np.ndarray:
    """``MEASURES`` of vectors along the last axis, stacked on a new last axis.

    Parameters
    ----------
    tokenwise, update, oracle : numpy.ndarray, shape (..., dim)

    Returns
    -------
    numpy.ndarray of float32, shape (..., 6)
    """
    update, oracle = np.asarray(update, float), np.asarray(oracle, float)
    added, misfit = update - oracle, oracle - np.asarray(tokenwise, float)
    residual = added + misfit
    size = norm(residual)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(size > 0, (residual * added).sum(axis=-1) / size**2, np.nan)
    measures = (
        norm(added), norm(misfit), size, share, cosine(residual, added), cosine(added, misfit)
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*measures), axis=-1).astype(np.float32)


def _oracle(data: xr.Dataset, model: Any) -> xr.DataArray:
    if ORACLE in data.function_class.values:
        return data.tokenwise.sel(function_class=ORACLE, drop=True)
    if model is None:
        raise ValueError(
            f"data: the class {ORACLE!r} is not among {list(data.function_class.values)}; "
            "decompose with it, or give model="
        )
    from geomstats_lm.self_only import run_block

    def alone(state: np.ndarray, layer: np.ndarray, token_id: np.ndarray) -> np.ndarray:
        result = np.empty(state.shape, dtype=np.float32)
        layers = np.broadcast_to(layer, state.shape[:-1])
        ids = np.broadcast_to(token_id, state.shape[:-1])
        for number in np.unique(layers):
            at = layers == number
            states = np.asarray(state[at], np.float32)
            result[at] = run_block(model, int(number), states, ids[at]) - states
        return result

    layers = xr.DataArray(data.layer.values, dims="layer")
    ids = xr.DataArray(data.token_id.values, dims="token")
    if data.state.chunks:
        layers = layers.chunk({"layer": data.state.variable.chunksizes["layer"]})
        ids = ids.chunk({"token": data.state.variable.chunksizes["token"]})
    return xr.apply_ufunc(
        alone, data.state, layers, ids, input_core_dims=[["dim"], [], []],
        output_core_dims=[["dim"]], dask="parallelized", output_dtypes=[np.float32],
    )  # fmt: skip


def _overlaps(
    data: xr.Dataset, oracle: xr.DataArray, usable: xr.DataArray, m: int
) -> dict[str, Any]:
    dims = ("model", "function_class", "layer")
    shape = tuple(data.sizes[d] for d in dims)
    cells = []
    for at in np.ndindex(*shape):
        where = {"model": at[0], "layer": at[2]}
        cells.append(
            dask.delayed(_overlap)(
                data.tokenwise.isel(where | {"function_class": at[1]}).data,
                data["update"].isel(where).data, oracle.isel(where).data,
                usable.isel(where).data, m,
            )
        )  # fmt: skip
    table = da.stack([da.from_delayed(cell, (2,), float) for cell in cells]).reshape((*shape, 2))
    return {
        "overlap_residual_context": (dims, table[..., 0], {"long_name": "mean squared cosine"}),
        "chance_overlap": (dims, table[..., 1], {"long_name": "overlap of random subspaces"}),
    }


def _overlap(
    tokenwise: np.ndarray, update: np.ndarray, oracle: np.ndarray, usable: np.ndarray, m: int
) -> np.ndarray:
    kept = np.asarray(usable)
    if not kept.any():
        return np.full(2, np.nan)
    residual, added = ((update - part)[kept] for part in (tokenwise, oracle))
    first = subspaces.streamed_subspace(lambda: [residual], m)
    second = subspaces.streamed_subspace(lambda: [added], m)
    found = subspaces.overlap(first.basis, second.basis)
    largest = max(first.components, second.components)
    return np.array([found, largest / update.shape[1] if np.isfinite(found) else np.nan])


def _pooled(
    values: np.ndarray, weights: np.ndarray, codes: np.ndarray, counts: np.ndarray,
    level: float, interval: str,
) -> list[dict[str, Any]]:  # fmt: skip
    everything = np.ones((len(counts), 1))
    mean, error = cluster_means(values, codes, everything, weights)
    means, errors = cluster_means(values, codes, counts, weights)
    rows = []
    for i in range(len(values)):
        seen = np.isfinite(values[i])
        n_clusters = len(np.unique(codes[seen]))
        estimate, se = float(mean[i, 0]), float(error[i, 0])
        low, high, _, reason = bootstrap_interval(
            estimate, means[i], kind=interval, level=level, std_error=se,
            replicate_std_errors=errors[i],
        )  # fmt: skip
        test = estimate / se if se > 0 else np.nan
        p_value = 2 * stats.t.sf(abs(test), n_clusters - 1) if n_clusters > 1 else np.nan
        rows.append(
            {"estimate": estimate, "std_error": se, "conf_low": low, "conf_high": high,
             "p_value": p_value, "n": int(seen.sum()), "n_clusters": n_clusters, "reason": reason}
        )  # fmt: skip
    return rows
