"""How much more does the residual matter than anything else of its size?

``damage_ratio = sum_i m_i / mean_draws sum_i m'_i`` over tokens i, m the damage when the residual
is taken off and m' that of a control of the same norm; the clusters of its interval are documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts, jackknife_counts
from geomstats_lm.statistics.results import Result

STATISTICS = ("mean", "median")
INTERVALS = ("percentile", "basic", "bca")
WEIGHTS_AT_ONCE = 1 << 24  # bounds the resampled weights of a median


def damage_ratio(
    perturbation: xr.Dataset,
    *,
    measure: str | None = None,
    statistic: str = "mean",
    groups: Mapping[str, Sequence[int]] | None = None,
    cluster: str = "document",
    n_boot: int = 1999,
    interval: str = "percentile",
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Ratio of the damage to that of each control, with cluster-bootstrap intervals.

    Parameters
    ----------
    perturbation : xarray.Dataset
        From :func:`perturb`: ``<measure>`` (model, function_class, positions, layer, token) and
        ``<measure>_control`` with control and draw besides; ``replacement`` may be a dim of both.
    measure : str, optional
        Which damage; the first that has a control, usually ``"kl"``, by default.
    statistic : {"mean", "median"}
        Ratio of means, or of medians, over tokens.  Of the control, the mean of a token is over
        its draws; a median is over tokens and draws.
    groups : mapping of str to sequence of int, optional
        Layers to be pooled, by name; each layer by itself by default.
    cluster : str
        Token coordinate whose values are drawn whole.
    n_boot : int
        Resamples.
    interval : {"percentile", "basic", "bca"}
    level : float
        Coverage of the intervals.
    seed : int
        Models of one seed are resampled independently; all cells of a model share resamples.

    Returns
    -------
    Result
        ``tidy()``: one row per model, function class, replacement, way of patching, control and
        layer (``layer``, or ``layer_group``): ``estimate``, ``std_error`` (of the bootstrap),
        ``conf_low``, ``conf_high``, ``damage`` and ``damage_control`` (the two means or medians),
        ``n`` tokens, ``n_clusters``, ``interval`` and ``reason``, and ``participation_ratio`` of
        the residuals (its mean over the layers of a group): where they vary in few directions,
        isotropic noise is no fair control.

    Raises
    ------
    ValueError
        If an argument is not among what is accepted, or the measure has no control.

    Notes
    -----
    Cluster bootstrap of a ratio of sums: Davison and Hinkley, *Bootstrap Methods and their
    Application*, 1997, sections 2.4 and 3.8.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> dims = ("model", "function_class", "positions", "layer", "token")
    >>> control = rng.gamma(2, size=(1, 1, 1, 1, 1, 1, 60))
    >>> kl = 1.5 * control[:, :, :, 0, 0] * rng.uniform(0.9, 1.1, 60)
    >>> data = xr.Dataset(
    ...     {"kl": (dims, kl), "kl_control": (dims[:3] + ("control", "draw") + dims[3:], control)},
    ...     {"model": ["tiny"], "function_class": ["affine"], "positions": ["all"],
    ...      "control": ["exchanged"], "layer": [1], "document": ("token", np.arange(60) // 4)},
    ... )
    >>> row = damage_ratio(data, n_boot=199).tidy().iloc[0]
    >>> bool(row.conf_low < 1.5 < row.conf_high), int(row.n_clusters)
    (True, 15)
    """
    measure = _check_arguments(perturbation, measure, statistic, interval, cluster, level, n_boot)
    cells = [d for d in ("model", "function_class", "replacement", "positions", "control")
             if d in perturbation[f"{measure}_control"].dims]  # fmt: skip
    layers = [int(v) for v in perturbation.layer.values]
    pooled = {str(v): [v] for v in layers} if groups is None else _groups(groups, layers)
    _, codes = np.unique(perturbation[cluster].values, return_inverse=True)
    n_clusters = int(codes.max()) + 1 if codes.size else 0
    resamples: dict[str, np.ndarray] = {}
    rows = []
    for key in itertools.product(*(_labels(perturbation, d) for d in cells)):
        at = dict(zip(cells, key))
        model = str(at.get("model", ""))
        if model not in resamples:
            resamples[model] = draw_counts(n_clusters, n_boot, seed=seed, label=model)
        real = _values(perturbation[measure], at)
        control = _values(perturbation[f"{measure}_control"], at)
        for name, members in pooled.items():
            inside = np.isin(layers, members)
            found = _ratio(
                real[:, inside], control[:, inside], codes, resamples[model],
                statistic=statistic, interval=interval, level=level,
            )  # fmt: skip
            where = {"layer": members[0]} if groups is None else {"layer_group": name}
            rows.append({**at, **where, **found, **_directions(perturbation, at, inside)})
    frame = pd.DataFrame(rows)
    if "replacement" in cells and "factor" in perturbation.coords:
        factor = frame["replacement"].map(perturbation["factor"].to_series())
        frame.insert(list(frame).index("replacement") + 1, "factor", factor)
    settings = {
        "measure": measure, "statistic": statistic, "cluster": cluster, "n_boot": n_boot,
        "interval": interval, "level": level, "seed": seed,
    }  # fmt: skip
    notes = [
        f"Ratio of {statistic}s of {measure} over tokens, to that of a control of the same norm; "
        f"{level:.0%} intervals from {n_boot} resamples of whole {cluster}s."
    ]
    fits = pd.DataFrame([{
        "measure": measure, "statistic": statistic, "n_clusters": n_clusters, "n_boot": n_boot,
        "n_estimates": len(frame), "n_undefined": int(frame["estimate"].isna().sum()),
    }])  # fmt: skip
    return Result(
        "Damage of the residual over that of controls of its size", frame, fits, settings,
        lambda: _observations(perturbation, measure), notes,
    )  # fmt: skip


def _check_arguments(
    perturbation: xr.Dataset,
    measure: str | None,
    statistic: str,
    interval: str,
    cluster: str,
    level: float,
    n_boot: int,
) -> str:
    controlled = [str(n).removesuffix("_control") for n in perturbation if "draw" in
                  perturbation[n].dims and str(n).endswith("_control")]  # fmt: skip
    if not controlled:
        raise ValueError(f"perturbation: no variable has a control, only {list(perturbation)}")
    if measure is None:
        measure = "kl" if "kl" in controlled else controlled[0]
    for name, given, accepted in (
        ("measure", measure, controlled), ("statistic", statistic, STATISTICS),
        ("interval", interval, INTERVALS),
    ):  # fmt: skip
        if given not in accepted:
            raise ValueError(f"{name}={given!r}: accepted are {', '.join(accepted)}")
    if cluster not in perturbation.coords or perturbation[cluster].dims != ("token",):
        along = [str(n) for n, c in perturbation.coords.items() if c.dims == ("token",)]
        raise ValueError(f"cluster={cluster!r}: accepted are the token labels {', '.join(along)}")
    if not 0 < level < 1 or n_boot < 2:
        raise ValueError(f"level={level}, n_boot={n_boot}: accepted are 0 < level < 1, n_boot >= 2")
    return measure


def _groups(groups: Mapping[str, Sequence[int]], layers: list[int]) -> dict[str, list[int]]:
    pooled = {str(name): [int(v) for v in members] for name, members in groups.items()}
    for name, members in pooled.items():
        if not members or set(members) - set(layers):
            raise ValueError(f"groups[{name!r}]={members}: accepted are layers among {layers}")
    if not pooled:
        raise ValueError("groups: accepted is at least one group of layers")
    return pooled


def _labels(data: xr.Dataset, dim: str) -> list[Any]:
    return data[dim].values.tolist() if dim in data.coords else list(range(data.sizes[dim]))


def _values(variable: xr.DataArray, at: Mapping[str, Any]) -> np.ndarray:
    """One cell's values, shape (draw or 1, layer, token)."""
    for dim, label in at.items():
        if dim in variable.dims:
            labelled = dim in variable.coords
            variable = variable.sel({dim: label}) if labelled else variable.isel({dim: label})
    values = variable.transpose("draw", "layer", "token", missing_dims="ignore").values
    return values if values.ndim == 3 else values[None]


def _directions(
    perturbation: xr.Dataset, at: Mapping[str, Any], inside: np.ndarray
) -> dict[str, float]:
    """The participation ratio that belongs beside a cell's ratio, where it was measured."""
    if "participation_ratio" not in perturbation:
        return {}
    ratio = perturbation["participation_ratio"]
    ratio = ratio.sel({dim: label for dim, label in at.items() if dim in ratio.dims})
    return {"participation_ratio": float(ratio.values[inside].mean())}


def _ratio(
    real: np.ndarray,
    control: np.ndarray,
    codes: np.ndarray,
    resamples: np.ndarray,
    *,
    statistic: str,
    interval: str,
    level: float,
) -> dict[str, Any]:
    """Estimate and interval of one cell: values (draw, layer, token), clusters (token,)."""
    # Pairs: a token counts where the residual and all its controls have a value.
    there = np.isfinite(real).all(axis=0) & np.isfinite(control).all(axis=0)
    n_clusters = len(resamples)
    summed = _sums if statistic == "mean" else _medians
    above, below = (summed(v, there, codes, n_clusters) for v in (real, control))
    once = np.ones((n_clusters, 1), dtype=np.int16)
    top, bottom = float(above(once)[0]), float(below(once)[0])
    estimate = float(_divided(np.array([top]), np.array([bottom]))[0])
    n_used = len(np.unique(codes[there.any(axis=0)]))
    found: dict[str, Any] = {
        "estimate": estimate, "std_error": np.nan, "conf_low": np.nan, "conf_high": np.nan,
        "damage": top, "damage_control": bottom, "n": int(there.sum()), "n_clusters": n_used,
        "interval": interval, "reason": "",
    }  # fmt: skip
    if not np.isfinite(estimate):
        return found | {
            "reason": "no patched tokens" if not there.any() else "the control does no damage"
        }
    if n_used < 2:
        return found | {"reason": "one cluster has no interval"}
    replicates = _divided(above(resamples), below(resamples))
    left_out = None
    if interval == "bca":
        counts = jackknife_counts(n_clusters)
        left_out = _divided(above(counts), below(counts))
    low, high, used, reason = bootstrap_interval(
        estimate, replicates, kind=interval, level=level, jackknife=left_out
    )
    spread = float(np.nanstd(replicates, ddof=1))
    return found | {
        "std_error": spread, "conf_low": low, "conf_high": high, "interval": used, "reason": reason,
    }  # fmt: skip


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0)


def _sums(values: np.ndarray, there: np.ndarray, codes: np.ndarray, n_clusters: int) -> Any:
    """Mean over tokens of the mean over draws, as a function of (n_clusters, B) counts."""
    token = np.where(there, values.mean(axis=0), 0.0).sum(axis=0)
    sums = np.bincount(codes, weights=token, minlength=n_clusters)
    sizes = np.bincount(codes, weights=there.sum(axis=0), minlength=n_clusters)
    return lambda counts: _divided(sums @ counts.astype(float), sizes @ counts.astype(float))


def _medians(values: np.ndarray, there: np.ndarray, codes: np.ndarray, n_clusters: int) -> Any:
    """Median over tokens and draws, as a function of (n_clusters, B) counts.

    With integer counts it is the middle value (the mean of the two middle ones) of the data in
    which every cluster stands as often as it was drawn.
    """
    cluster = np.broadcast_to(codes, values.shape)[:, there].ravel()
    flat = values[:, there].ravel()
    order = np.argsort(flat, kind="stable")
    flat, cluster = flat[order], cluster[order]

    def medians(counts: np.ndarray) -> np.ndarray:
        run = max(1, WEIGHTS_AT_ONCE // max(1, len(flat)))
        found = np.full(counts.shape[1], np.nan)
        for begin in range(0, counts.shape[1], run):
            weight = counts[cluster, begin : begin + run].astype(np.int64).cumsum(axis=0)
            if not len(flat):
                break
            for column, total in enumerate(weight[-1]):
                if total:
                    middle = [(total - 1) // 2 + 1, total // 2 + 1]
                    found[begin + column] = flat[np.searchsorted(weight[:, column], middle)].mean()
        return found

    return medians


def _observations(perturbation: xr.Dataset, measure: str) -> pd.DataFrame:
    control = perturbation[f"{measure}_control"].mean("draw")
    real = perturbation[measure]
    both = xr.Dataset({measure: real, f"{measure}_control": control})
    frame = both.to_dataframe().reset_index()
    return frame.dropna(subset=[measure]).reset_index(drop=True)
