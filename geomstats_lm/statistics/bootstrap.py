"""How sure is any number computed from clustered data?

    theta_b = statistic(the rows of G clusters drawn with replacement),   b = 1..B

For statistics that have no kernel of their own. The statistic is called on labelled data, so
whatever can be written on a frame or a Dataset has an interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.formula import check_known
from geomstats_lm.statistics.inference import infer, warn_of_few
from geomstats_lm.statistics.resampling import draw_counts, jackknife_counts
from geomstats_lm.statistics.results import Result

Data = pd.DataFrame | xr.Dataset
KINDS = ("percentile", "bca", "basic", "bootstrap-t")
# what a statistic may raise on a resample that it cannot handle
DEGENERATE = (ArithmeticError, ValueError, np.linalg.LinAlgError)


def cluster_bootstrap(
    statistic: Callable[[Any], Any],
    data: Data,
    *,
    cluster: str = "document",
    n_boot: int = 2000,
    stratify: str | None = None,
    interval: str = "percentile",
    level: float = 0.95,
    std_error: Callable[[Any], Any] | None = None,
    n_inner: int = 25,
    null: float = 0.0,
    seed: int = 0,
) -> Result:
    """Bootstrap any statistic of labelled data by drawing whole clusters.

    Parameters
    ----------
    statistic
        Called on data of the same type; returns a number, a Series, a dict, a 1-d array or a
        DataArray.
    data
        A frame with a column `cluster`, or a Dataset whose coordinate `cluster` lies along one dim.
        In a resample the cluster label is the number of the draw, so that copies stay apart.
    cluster, stratify
        What is drawn, and groups of clusters within which the draws stay.
    n_boot, level, seed
        Resamples, coverage, and what fixes them.
    interval
        "percentile", "basic", "bca" (leaves out clusters one at a time) or "bootstrap-t".
    std_error
        For "bootstrap-t": standard errors of the statistic's values, from the same data. None
        takes the spread of `n_inner` further resamples of every resample.
    null
        Value that `p_value` tests.

    Returns
    -------
    Result
        One row per value of the statistic; `replicates` has dims (term, boot). Degenerate resamples
        (NaN, or an arithmetic error) are counted.

    Raises
    ------
    ValueError
        Unknown cluster or stratum, one cluster only, a stratum that cuts a cluster.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"x": np.arange(60.0), "document": np.repeat(np.arange(12), 5)})
    >>> result = cluster_bootstrap(lambda part: part["x"].median(), frame, n_boot=200)
    >>> result.tidy()[["term", "estimate", "n_clusters"]]
            term  estimate  n_clusters
    0  statistic      29.5          12
    """
    if interval not in KINDS:
        raise ValueError(f"interval={interval!r} is not one of {', '.join(KINDS)}")
    n_clusters, take, strata = _rows_by_cluster(data, cluster, stratify)
    if n_clusters < 2:
        raise ValueError(f"cluster={cluster!r} has {n_clusters} label: at least 2 are needed")
    terms, estimates = _values(statistic(data))
    counts = draw_counts(n_clusters, n_boot, seed=seed, strata=strata)
    everything = np.concatenate([np.ones((n_clusters, 1), np.int16), counts], axis=1)

    def on(drawn: np.ndarray, function: Callable[[Any], Any] = statistic) -> np.ndarray:
        try:
            return _values(function(take(drawn)))[1]
        except DEGENERATE:
            return np.full(len(terms), np.nan)

    replicates = np.stack([on(column) for column in counts.T], axis=1)
    jackknife = None
    if interval == "bca":
        jackknife = np.stack([on(column) for column in jackknife_counts(n_clusters).T], axis=1)
    errors = None
    if interval == "bootstrap-t":
        if std_error is not None:
            spread = std_error
            errors = np.stack([on(column, spread) for column in everything.T], axis=1)
        else:
            errors = np.stack(
                [
                    _nested(on, column, strata, n_inner, [seed, b])
                    for b, column in enumerate(everything.T)
                ],
                axis=1,
            )
    rows = []
    for k, term in enumerate(terms):
        undefined = not np.isfinite(estimates[k])
        row = infer(
            float(estimates[k]),
            replicates[k],
            n_clusters=n_clusters,
            kind=interval,
            level=level,
            jackknife=None if jackknife is None else jackknife[k],
            z_std_error=None if errors is None else float(errors[k, 0]),
            z_std_errors=None if errors is None else errors[k, 1:],
            reason="the statistic is not finite on the data" if undefined else "",
            bounded=False,
            null=null,
        )
        rows.append({"term": term, **row, "n_clusters": n_clusters})
    table = pd.DataFrame(rows)
    warn_of_few(table["n_clusters"])
    settings = {
        "cluster": cluster,
        "stratify": stratify,
        "interval": interval,
        "level": level,
        "n_boot": n_boot,
        "null": null,
        "seed": seed,
    }
    name = getattr(statistic, "__name__", type(statistic).__name__)
    return Result(
        title=f"Cluster bootstrap of {'a statistic' if name == '<lambda>' else name}",
        estimates=table,
        fits=pd.DataFrame([{**settings, "n_clusters": n_clusters}]),
        settings=settings,
        replicates=xr.DataArray(
            replicates, dims=("term", "boot"), coords={"term": terms}, name="replicates"
        ),
    )


def _rows_by_cluster(
    data: Data, cluster: str, stratify: str | None
) -> tuple[int, Callable[[np.ndarray], Data], np.ndarray | None]:
    """Number of clusters, a function from counts to resampled data, and each cluster's stratum."""
    if not isinstance(data, pd.DataFrame | xr.Dataset):
        raise TypeError(f"data: expected a DataFrame or a Dataset, got {type(data).__name__}")
    known = data.columns if isinstance(data, pd.DataFrame) else data.variables
    check_known([cluster], known, "cluster")
    check_known([stratify] if stratify else [], known, "stratify")
    if isinstance(data, xr.Dataset) and len(data[cluster].dims) != 1:
        raise ValueError(f"cluster={cluster!r} must lie along one dim, not {data[cluster].dims}")
    codes, labels = pd.factorize(np.asarray(data[cluster]), sort=True)
    members = [np.flatnonzero(codes == g) for g in range(len(labels))]
    strata = None
    if stratify:
        strata, _ = pd.factorize(np.asarray(data[stratify]), sort=True)
        cut = [labels[g] for g, rows in enumerate(members) if len(np.unique(strata[rows])) > 1]
        if cut:
            raise ValueError(f"stratify={stratify!r} cuts clusters: {cut[:5]}")
        strata = np.array([strata[rows[0]] for rows in members])

    def take(drawn: np.ndarray) -> Data:
        chosen = np.repeat(np.arange(len(members)), drawn)
        rows = np.concatenate([members[g] for g in chosen]) if chosen.size else np.empty(0, int)
        # copies of a cluster stay apart for statistics that group by it
        numbers = np.repeat(np.arange(chosen.size), [len(members[g]) for g in chosen])
        if isinstance(data, pd.DataFrame):
            return data.iloc[rows].assign(**{cluster: numbers})
        dim = data[cluster].dims[0]
        return data.isel({dim: rows}).assign_coords({cluster: (dim, numbers)})

    return len(members), take, strata


def _values(value: Any) -> tuple[list[Any], np.ndarray]:
    """Terms and numbers of whatever a statistic returned."""
    if isinstance(value, dict):
        value = pd.Series(value)
    if isinstance(value, xr.DataArray) and value.ndim:
        value = value.to_series()
    if isinstance(value, pd.Series):
        return value.index.tolist(), value.to_numpy(dtype=float)
    numbers = np.asarray(value, dtype=float)
    if numbers.ndim > 1:
        raise TypeError(f"statistic: expected a number or one dimension, got shape {numbers.shape}")
    return (["statistic"] if numbers.ndim == 0 else list(range(numbers.size))), np.atleast_1d(
        numbers
    )


def _nested(
    on: Callable[..., np.ndarray],
    drawn: np.ndarray,
    strata: np.ndarray | None,
    n_inner: int,
    seed: list[int],
) -> np.ndarray:
    """Standard error of a resample, from resamples of it."""
    rng = np.random.default_rng([*seed, 5])
    strata = np.zeros(drawn.size, int) if strata is None else strata
    inner = np.zeros((drawn.size, n_inner), int)
    for level in np.unique(strata):
        member = strata == level
        size = int(drawn[member].sum())
        inner[member] = rng.multinomial(size, drawn[member] / size, size=n_inner).T
    values = np.stack([on(column) for column in inner.T], axis=1)
    finite = np.isfinite(values)
    enough = finite.sum(axis=1) > 1
    centred = np.where(finite, values, 0.0)
    number = np.maximum(finite.sum(axis=1), 2)
    centred = np.where(finite, values - (centred.sum(axis=1) / number)[:, None], 0.0)
    return np.where(enough, np.sqrt((centred**2).sum(axis=1) / (number - 1)), np.nan)
