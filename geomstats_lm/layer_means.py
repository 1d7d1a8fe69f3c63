"""What is the mean of a measure in every layer, and how sure is it?

    estimate = mean over the layers of a group of the means over their usable tokens

with intervals from whole documents drawn with replacement; of ``r2_centred`` and ``explained``,
which are ratios of sums, the sums are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts
from geomstats_lm.statistics.results import Result

# 1 - sum |r|^2 / sum |weight|^2
RATIOS = {"r2_centred": "update_centred_norm", "explained": "update_norm"}


def layer_means(
    data: xr.Dataset,
    measures: Sequence[str] = (
        "relative_error",
        "cos_update_tokenwise",
        "cos_centred",
        "r2_centred",
    ),
    *,
    groups: Mapping[str, Sequence[int]] | None = None,
    cluster: str = "document",
    n_boot: int = 999,
    level: float = 0.95,
    interval: str = "bootstrap-t",
    seed: int = 0,
) -> Result:
    """Means over tokens by model, function class and layer, with cluster-bootstrap intervals.

    Parameters
    ----------
    data : xarray.Dataset
        From :func:`geomstats_lm.geometry`, or any variables (model, [function_class,] layer,
        token); with ``usable`` (model, layer, token) only those tokens count.
    measures : sequence of str
        Variables per token, and ``r2_centred`` and ``explained``.
    groups : mapping of str to sequence of int, optional
        Layers whose means are averaged, by name; each layer by itself by default.
    cluster : str
        Token coordinate whose levels are drawn whole.
    n_boot : int
        Resamples; layers and classes of a model share them.
    level : float
        Coverage of the intervals.
    interval : {"bootstrap-t", "percentile", "basic"}
    seed : int

    Returns
    -------
    Result
        ``tidy()`` has one row per model, function class, layer (or ``layer_group``) and measure:
        ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``n`` tokens, ``n_clusters``.

    Raises
    ------
    ValueError
        If a measure, the coordinate or a layer of a group is not there.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> dims = ("model", "function_class", "layer", "token")
    >>> data = xr.Dataset(
    ...     {"relative_error": (dims, rng.uniform(0.4, 0.6, (1, 1, 2, 90)))},
    ...     {"model": ["tiny"], "function_class": ["affine"], "layer": [1, 2],
    ...      "document": ("token", np.repeat(np.arange(30), 3))},
    ... )
    >>> means = layer_means(data, ["relative_error"], n_boot=99).tidy()
    >>> means[["layer", "estimate", "n_clusters"]].round(2)
       layer  estimate  n_clusters
    0      1      0.51          30
    1      2      0.51          30
    """
    if interval not in ("bootstrap-t", "percentile", "basic"):
        raise ValueError(f"interval={interval!r}: 'bootstrap-t', 'percentile', 'basic'")
    if cluster not in data.coords or data[cluster].dims != ("token",):
        along = [str(n) for n, c in data.coords.items() if c.dims == ("token",)]
        raise ValueError(f"cluster={cluster!r} is no token coordinate; there are {along}")
    absent = [m for m in measures if _needs(m) - set(data) or (m in data and m not in RATIOS
              and "token" not in data[m].dims)]  # fmt: skip
    if absent or isinstance(measures, str) or not len(measures):
        raise ValueError(f"measures: {absent or measures} are not variables per token of data")
    needed = sorted(set().union(*(_needs(m) for m in measures)) | ({"usable"} & set(data)))
    data = data[needed].compute()
    labels, codes = np.unique(data[cluster].values, return_inverse=True)
    members = layer_rows(data.layer.values, groups)
    rows = []
    for model in data.model.values:
        counts = draw_counts(len(labels), n_boot, seed=seed, label=str(model))
        one = data.sel(model=model)
        classes = one.function_class.values if "function_class" in one.dims else [None]
        for label, measure in ((c, m) for c in classes for m in measures):
            own = one if label is None else one.sel(function_class=label)
            values, weights = _values(own, measure)
            found = _estimates(values, weights, codes, counts, members, level, interval)
            if measure in RATIOS:
                for row in found:
                    low, high = 1 - row["conf_high"], 1 - row["conf_low"]
                    row.update(estimate=1 - row["estimate"], conf_low=low, conf_high=high)
            lead = {"model": model, **({} if label is None else {"function_class": label})}
            name = "layer" if groups is None else "layer_group"
            rows += [
                {**lead, name: group, "measure": measure, **row}
                for (group, _), row in zip(members, found)
            ]
    settings = {"cluster": cluster, "n_boot": n_boot, "level": level, "interval": interval,
                "seed": seed}  # fmt: skip
    notes = [f"Means over usable tokens; {level:.0%} intervals from {n_boot} resamples of whole "
             f"{cluster}s ({len(labels)})."]  # fmt: skip
    return Result(
        "Means over tokens", pd.DataFrame(rows),
        pd.DataFrame([{**settings, "n_clusters": len(labels), "n_estimates": len(rows)}]),
        settings, lambda: data.to_dataframe().reset_index(), notes,
    )  # fmt: skip


def _needs(measure: str) -> set[str]:
    return {"residual_norm", RATIOS[measure]} if measure in RATIOS else {measure}


def _values(data: xr.Dataset, measure: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Values (layer, token) of a measure and their weights, NaN where a token does not count."""
    if "usable" in data:
        data = data.drop_vars("usable").where(data.usable)

    def array(name: str) -> np.ndarray:
        return data[name].transpose("layer", "token").values.astype(float)

    if measure not in RATIOS:
        return array(measure), None
    weights = array(RATIOS[measure]) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weights > 0, array("residual_norm") ** 2 / weights, np.nan), weights


def _estimates(
    values: np.ndarray, weights: np.ndarray | None, codes: np.ndarray, counts: np.ndarray,
    members: list[tuple[Any, list[int]]], level: float, interval: str,
) -> list[dict[str, Any]]:  # fmt: skip
    groups = [inside for _, inside in members]
    everything = np.ones((len(counts), 1))
    mean, error = group_means(values, codes, everything, groups, weights)
    means, errors = group_means(values, codes, counts, groups, weights)
    rows = []
    for i, inside in enumerate(groups):
        seen = np.isfinite(values[inside])
        low, high, _, reason = bootstrap_interval(
            float(mean[i, 0]), means[i], kind=interval, level=level,
            std_error=float(error[i, 0]), replicate_std_errors=errors[i],
        )  # fmt: skip
        rows.append(
            {"estimate": float(mean[i, 0]), "std_error": float(error[i, 0]), "conf_low": low,
             "conf_high": high, "n": int(seen.sum()),
             "n_clusters": len(np.unique(codes[seen.any(axis=0)])), "reason": reason}
        )  # fmt: skip
    return rows


def cluster_means(
    values: np.ndarray,
    codes: np.ndarray,
    counts: np.ndarray,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(Weighted) mean of each row and its cluster-robust standard error, at all columns of counts.

    Parameters
    ----------
    values : numpy.ndarray, shape (rows, n)
        NaN are left out.
    codes : numpy.ndarray of int, shape (n,)
        Cluster of each column.
    counts : numpy.ndarray, shape (clusters, resamples)
        How often each cluster is there.
    weights : numpy.ndarray, shape (rows, n), optional
        With weights w and values y/w the mean is the ratio of sums of y and of w.

    Returns
    -------
    means, std_errors : numpy.ndarray, shape (rows, resamples)
        ``se^2 = G/(G-1) sum_g (S_g - mean N_g)^2 / N^2`` with sums S_g of ``w y`` and N_g of w.
    """
    n_clusters = len(counts)
    there = np.isfinite(values)
    weights = there.astype(float) if weights is None else np.where(there, weights, 0.0)
    filled = np.where(there, values, 0.0) * weights
    sums = np.stack([np.bincount(codes, row, n_clusters) for row in filled])
    sizes = np.stack([np.bincount(codes, row, n_clusters) for row in weights])
    drawn = counts.astype(float)
    total, number = sums @ drawn, sizes @ drawn
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(number > 0, total / number, np.nan)
        used = (sizes > 0).astype(float) @ drawn
        spread = (
            (sums**2) @ drawn - 2 * means * ((sums * sizes) @ drawn) + means**2 * (sizes**2 @ drawn)
        )
        variance = used / (used - 1) * np.maximum(spread, 0) / number**2
    return means, np.sqrt(np.where(used > 1, variance, np.nan))


def layer_rows(
    layers: np.ndarray, groups: Mapping[str, Sequence[int]] | None
) -> list[tuple[Any, list[int]]]:
    """Label and row numbers of every group of layers; each layer by itself without groups."""
    present = layers.tolist()
    if groups is None:
        return [(layer, [i]) for i, layer in enumerate(layers)]
    for name, members in groups.items():
        if not len(members) or set(members) - set(present):
            raise ValueError(
                f"groups[{name!r}]={list(members)}: accepted are layers among {present}"
            )
    return [(name, [present.index(v) for v in members]) for name, members in groups.items()]


def group_means(
    values: np.ndarray,
    codes: np.ndarray,
    counts: np.ndarray,
    groups: Sequence[Sequence[int]],
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Means over groups of rows of what :func:`cluster_means` gives, and their standard errors.

    Parameters
    ----------
    values, codes, counts, weights
        As for :func:`cluster_means`; rows are layers, columns tokens, all on shared clusters.
    groups : sequence of sequence of int
        Rows of each group.

    Returns
    -------
    means, std_errors : numpy.ndarray, shape (groups, resamples)
        A cluster's influence on a group is the mean of its influences on the rows, so that the
        dependence between layers of one document is kept.
    """
    n_clusters, drawn = len(counts), counts.astype(float)
    there = np.isfinite(values)
    weights = there.astype(float) if weights is None else np.where(there, weights, 0.0)
    filled = np.where(there, values, 0.0) * weights
    found = []
    for rows in groups:
        mean: Any = 0.0
        influence: Any = 0.0
        used = np.zeros(n_clusters, dtype=bool)
        for row in rows:
            sums = np.bincount(codes, filled[row], n_clusters)
            sizes = np.bincount(codes, weights[row], n_clusters)
            with np.errstate(divide="ignore", invalid="ignore"):
                number = sizes @ drawn
                own = np.where(number > 0, sums @ drawn / number, np.nan)
                influence = influence + (sums[:, None] - own * sizes[:, None]) / number
            mean, used = mean + own, used | (sizes > 0)
        number = used.astype(float) @ drawn
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = number / (number - 1) * (drawn * (influence / len(rows)) ** 2).sum(axis=0)
        found.append((mean / len(rows), np.sqrt(np.where(number > 1, variance, np.nan))))
    means, errors = zip(*found)
    return np.stack(means), np.stack(errors)
