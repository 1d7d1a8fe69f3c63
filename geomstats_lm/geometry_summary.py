"""In which layers is the residual's direction more than its size and chance explain?

    estimate = mean over tokens of (observed - null),   interval by resampling whole documents

A layer is called distinct only where that interval excludes 0 and e < 1; verdicts name their null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from geomstats_lm.layer_means import group_means, layer_rows
from geomstats_lm.nulls import angle_variance, direction_spread, forced
from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts
from geomstats_lm.statistics.results import Result

# measure -> the null that its verdict is about
VERDICTS = {
    "cos_update_tokenwise": "forced",
    "cos_update_residual": "forced",
    "angle_residual_tokenwise": "forced",
    "energy_residual": "isotropic",
    "energy_update": "isotropic",
}
# the same, for measures that only a request brings
ON_REQUEST = {"cos_residual_tokenwise": "forced"}
COLUMNS = (
    "model", "function_class", "layer", "measure", "null", "observed", "forced", "null_mean",
    "null_low", "null_high", "estimate", "std_error", "conf_low", "conf_high", "p_value",
    "verdict", "relative_error", "n", "n_clusters", "n_error_above_one", "reason",
)  # fmt: skip
SHOWN = (
    "model", "function_class", "layer", "measure", "null", "observed", "forced", "null_mean",
    "null_low", "null_high", "estimate", "conf_low", "conf_high", "verdict",
)  # fmt: skip


@dataclass
class GeometrySummary(Result):
    """Observed geometry beside its nulls, one row per (class, layer, measure, null)."""

    def distinct(self) -> pd.DataFrame:
        """The rows whose verdict is that the residual is geometrically distinct."""
        frame = self.tidy()
        return frame[frame["verdict"].str.startswith("distinct")].reset_index(drop=True)

    def summary(self, rows: int = 40) -> str:
        """The page for people: what was seen beside what was to be expected."""
        there = ["layer_group" if n == "layer" and n not in self.estimates else n for n in SHOWN]
        shown = [name for name in there if name != "model" or self.estimates["model"].nunique() > 1]
        page = Result(self.title, self.estimates[shown], self.fits, self.settings)
        page.notes = self.notes
        return page.summary(rows)


def geometry_summary(
    geometry: xr.Dataset,
    nulls: Sequence[xr.Dataset] = (),
    *,
    measures: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    cluster: str = "document",
    n_boot: int = 999,
    level: float = 0.95,
    interval: str = "bootstrap-t",
    seed: int = 0,
) -> GeometrySummary:
    """Compare a geometry with what the size of the residual forces and with further nulls.

    Parameters
    ----------
    geometry : xarray.Dataset
        From :func:`geomstats_lm.geometry`.
    nulls : sequence of xarray.Dataset
        From the functions of :mod:`geomstats_lm.nulls` and :mod:`geomstats_lm.refits`, of the same
        tokens.
    measures : sequence of str, optional
        Variables per token; by default the cosines and the angle of update, tokenwise part and
        residual, and the energies where there are any (``cos_residual_tokenwise``, which says what
        the angle says, on request).
    groups : mapping of str to sequence of int, optional
        Layers whose means are averaged, by name (column ``layer_group`` in place of ``layer``);
        each layer by itself by default.
    cluster : str
        Token coordinate whose levels are drawn whole.
    n_boot : int
        Resamples.
    level : float
        Coverage of the intervals.
    interval : {"bootstrap-t", "percentile", "basic"}
    seed : int

    Returns
    -------
    GeometrySummary
        ``tidy()`` has one row per model, function class, layer, measure and null: ``observed`` and
        ``forced`` (means over tokens), ``null_mean`` with ``null_low`` and ``null_high`` (where a
        layer's mean would lie if the null held), ``estimate`` = observed - null with its interval,
        and the ``verdict``, which only the null named in the note gives.

    Raises
    ------
    ValueError
        If a measure, a coordinate or a null's tokens do not fit.

    Notes
    -----
    A random direction is not exactly at a right angle: of the ``forced`` null the mean over
    directions is taken (:func:`geomstats_lm.nulls.direction_spread`), else every layer would be
    called distinct.  The energy of an isotropic residual is Beta(m/2, (d - m)/2).

    Examples
    --------
    >>> from geomstats_lm import geometry
    >>> rng = np.random.default_rng(0)
    >>> dims = ("model", "layer", "token", "dim")
    >>> update = xr.DataArray(rng.normal(size=(1, 1, 60, 8)), dims=dims)
    >>> data = xr.Dataset(
    ...     {"update": update, "state": update,
    ...      "tokenwise": 0.5 * update.expand_dims(function_class=["half"])},
    ...     {"document": ("token", np.repeat(np.arange(20), 3))},
    ... )
    >>> table = geometry_summary(geometry(data), n_boot=99).tidy()
    >>> table.query("measure == 'angle_residual_tokenwise'").verdict.item()
    'distinct from forced: below'
    """
    data = _labelled(geometry, cluster)
    chosen = [m for m in VERDICTS if m in data] if measures is None else list(measures)
    unknown = [m for m in chosen if m not in data or "token" not in data[m].dims]
    if unknown or not chosen:
        raise ValueError(f"measures: {unknown or chosen} are not variables per token of geometry")
    if interval not in ("bootstrap-t", "percentile", "basic"):
        raise ValueError(f"interval={interval!r}: 'bootstrap-t', 'percentile', 'basic'")
    exact = forced(data).isel(null=0)
    labels, codes = np.unique(data[cluster].values, return_inverse=True)
    counts = draw_counts(len(labels), n_boot, seed=seed, label=str(data.model.values[0]))
    how = {"codes": codes, "counts": counts, "level": level, "interval": interval,
           "groups": layer_rows(data.layer.values, groups)}  # fmt: skip
    others = [_aligned(null, data) for null in nulls]
    given = [str(null["null"].item()) for null in others]
    rows: list[dict[str, Any]] = []
    for measure in chosen:
        by_null: dict[str, xr.DataArray | None] = {
            name: null[measure] for name, null in zip(given, others) if measure in null
        }
        verdict_null = {**VERDICTS, **ON_REQUEST}.get(measure, "")
        if verdict_null == "forced":
            by_null = {"forced": None, **by_null}
        elif measure == "energy_residual" and "energy_forced" in data:
            by_null = {"isotropic": None, **{k: v for k, v in by_null.items() if k != "isotropic"}}
        for name, drawn in by_null.items():
            rows += _rows(data, exact, measure, name, drawn, name == verdict_null, how)
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    if groups is not None:
        frame = frame.rename(columns={"layer": "layer_group"})
    notes = [
        "forced: right angle of residual and tokenwise part, averaged over random directions in d "
        "dims; null_low and null_high: where the mean of a layer lies if the null holds.",
        "Beside forced cosines stand the tokens with e < 1 only; cos_update_tokenwise lies above "
        "the null also where angles on both sides of 90 degrees cancel in their mean.",
        f"Intervals of {level:.0%} are each layer's own; {len(labels)} clusters by {cluster}.",
    ]
    return GeometrySummary(
        title="Geometry of the residual beside its nulls",
        estimates=frame,
        fits=_fits(frame, len(labels)),
        settings={"cluster": cluster, "interval": interval, "level": level, "n_boot": n_boot,
                  "nulls": given, "seed": seed},
        observations=lambda: data[chosen].to_dataframe().reset_index(),
        notes=notes,
    )  # fmt: skip


def _labelled(geometry: xr.Dataset, cluster: str) -> xr.Dataset:
    needed = ("relative_error", "residual_norm", "tokenwise_norm", "angle_residual_tokenwise")
    missing = [name for name in needed if name not in geometry]
    if missing:
        raise ValueError(f"geometry: variables {missing} are missing; there are {list(geometry)}")
    if "dim" not in geometry.attrs:
        raise ValueError("geometry: its attribute 'dim', the number of dims of a state, is missing")
    if cluster not in geometry.coords or geometry[cluster].dims != ("token",):
        found = [n for n, c in geometry.coords.items() if c.dims == ("token",)]
        raise ValueError(f"cluster={cluster!r} is no token coordinate; there are {found}")
    for dim in ("model", "layer", "function_class"):
        if dim not in geometry.coords:
            geometry = geometry.assign_coords({dim: np.arange(geometry.sizes[dim])})
    usable = geometry["usable"]
    per_token = [n for n, v in geometry.data_vars.items() if "token" in v.dims and n != "usable"]
    kept = geometry.assign({n: geometry[n].where(usable) for n in per_token})
    return kept.compute()


def _aligned(null: xr.Dataset, data: xr.Dataset) -> xr.Dataset:
    if "null" not in null.dims or null.sizes["null"] != 1:
        raise ValueError("nulls: each is a Dataset with a dim 'null' of length 1")
    null = null.isel(null=0)
    for dim in ("layer", "function_class", "token"):
        if dim in null.coords and dim in data.coords:
            shared = np.isin(data[dim].values, null[dim].values)
            if dim == "token" and not shared.all():
                raise ValueError("nulls: tokens are not those of geometry")
    keep = [n for n in VERDICTS if n in null] + [
        n for n in null if n in data and "token" in null[n].dims and n not in VERDICTS
    ]
    return null[[n for n in keep if n != "usable"]]


def _rows(
    data: xr.Dataset,
    exact: xr.Dataset,
    measure: str,
    name: str,
    drawn: xr.DataArray | None,
    judged: bool,
    how: dict[str, Any],
) -> list[dict[str, Any]]:
    """One row per (model, class, layer) of a measure beside one null."""
    rows = []
    for model in data.model.values:
        for label in data.function_class.values:
            at = {"model": model, "function_class": label}
            one = data.sel(at)
            if drawn is None:
                null, low, high = _expected(
                    one, exact.sel(at), measure, int(data.attrs["dim"]), how
                )
            else:
                if label not in drawn.function_class.values:
                    continue
                null, low, high = _drawn(drawn.sel(at), one, how)
            rows += _compare(one, exact.sel(at), measure, name, null, low, high, judged, how)
    return rows


def _expected(
    one: xr.Dataset, exact: xr.Dataset, measure: str, dim: int, how: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expected value per token (layer, token) and the range of a layer's mean, by quadrature."""
    value = exact[measure].transpose("layer", "token").values.astype(float)
    seen = np.isfinite(one[measure].transpose("layer", "token").values)
    if measure == "energy_residual":
        m = one.n_components.values.astype(float)[:, None]
        variance = 2 * m * (dim - m) / (dim**2 * (dim + 2.0)) + 0 * value
    elif measure == "angle_residual_tokenwise":
        variance = angle_variance(dim) + 0 * value
    elif measure == "cos_residual_tokenwise":
        variance = 1 / dim + 0 * value
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (one.residual_norm / one.tokenwise_norm).transpose("layer", "token").values
        spread = direction_spread(ratio.astype(float), dim)
        which = 0 if measure == "cos_update_tokenwise" else 1
        value, variance = value + spread[..., which, 0], spread[..., which, 1]
    value = np.where(seen, value, np.nan)
    variance = np.where(np.isfinite(value), variance, 0.0)
    number = np.isfinite(value).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = stats.norm.ppf((1 + how["level"]) / 2) * np.sqrt(variance.sum(axis=1)) / number
    mean = _mean(value)
    return value, mean - half, mean + half


def _drawn(
    drawn: xr.DataArray, one: xr.Dataset, how: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over draws per token, and the range of a layer's mean over draws."""
    drawn = drawn.sel(token=one.token) if "token" in drawn.coords else drawn
    if "layer" in drawn.coords:
        drawn = drawn.reindex(layer=one.layer)
    drawn = drawn if "draw" in drawn.dims else drawn.expand_dims("draw")
    values = drawn.transpose("draw", "layer", "token").where(one.usable).values.astype(float)
    means = np.stack([_mean(v) for v in values])
    tails = [(1 - how["level"]) / 2, (1 + how["level"]) / 2]
    low, high = np.full((2, means.shape[1]), np.nan)  # one draw shows no spread
    if len(means) > 1:
        low, high = np.quantile(means, tails, axis=0)
    counted = np.isfinite(values).sum(axis=0)
    total = np.where(np.isfinite(values), values, 0.0).sum(axis=0)
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan), low, high


def _compare(
    one: xr.Dataset,
    exact: xr.Dataset,
    measure: str,
    name: str,
    null: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    judged: bool,
    how: dict[str, Any],
) -> list[dict[str, Any]]:
    observed = one[measure].transpose("layer", "token").values.astype(float)
    difference = observed - null
    both = np.isfinite(difference)
    everything = np.ones((len(how["counts"]), 1))
    members = [rows for _, rows in how["groups"]]
    mean, error = group_means(difference, how["codes"], everything, members)
    means, errors = group_means(difference, how["codes"], how["counts"], members)
    at_right_angle = (
        _mean(exact[measure].transpose("layer", "token").values)
        if measure in exact
        else np.full(len(observed), np.nan)
    )
    pooled = np.sqrt(one.energy_share_residual.values)
    seen, expected = _mean(np.where(both, observed, np.nan)), _mean(np.where(both, null, np.nan))
    centre = (low + high) / 2
    rows = []
    for i, (label, inside) in enumerate(how["groups"]):
        n_clusters = len(np.unique(how["codes"][both[inside].any(axis=0)]))
        estimate, se = float(mean[i, 0]), float(error[i, 0])
        conf_low, conf_high, _, reason = bootstrap_interval(
            estimate, means[i], kind=how["interval"], level=how["level"], std_error=se,
            replicate_std_errors=errors[i],
        )  # fmt: skip
        test = estimate / se if se > 0 else np.nan
        relative_error = float(pooled[inside].mean())
        verdict = ""
        if judged:
            verdict, why = _verdict(name, relative_error, conf_low, conf_high, n_clusters)
            reason = why or reason
        # layers of a group are drawn apart under the null, so half widths add as squares
        half = np.sqrt(((high - low)[inside] ** 2).sum()) / 2 / len(inside)
        rows.append(
            {
                "model": one.model.item(), "function_class": one.function_class.item(),
                "layer": label, "measure": measure, "null": name,
                "observed": seen[inside].mean(), "forced": at_right_angle[inside].mean(),
                "null_mean": expected[inside].mean(),
                "null_low": centre[inside].mean() - half,
                "null_high": centre[inside].mean() + half,
                "estimate": estimate, "std_error": se,
                "conf_low": conf_low, "conf_high": conf_high,
                "p_value": 2 * stats.t.sf(abs(test), n_clusters - 1) if n_clusters > 1 else np.nan,
                "verdict": verdict, "relative_error": relative_error,
                "n": int(both[inside].sum()), "n_clusters": n_clusters,
                "n_error_above_one": int(one.n_error_above_one.values[inside].sum()),
                "reason": reason,
            }
        )  # fmt: skip
    return rows


def _verdict(null: str, error: float, low: float, high: float, n_clusters: int) -> tuple[str, str]:
    if not np.isfinite(error) or error >= 1:
        return "no verdict", f"e = {error:.2f}: the fit is no better than no update"
    if not (np.isfinite(low) and np.isfinite(high)):
        return "no verdict", f"no interval from {n_clusters} clusters"
    if low > 0 or high < 0:
        return f"distinct from {null}: {'above' if low > 0 else 'below'}", ""
    return f"not distinct from {null}", ""


def _fits(frame: pd.DataFrame, n_clusters: int) -> pd.DataFrame:
    judged = frame[frame["verdict"] != ""]
    grouped = judged.groupby(["model", "function_class", "measure"], sort=False)
    fits = grouped.agg(
        n_layers=("verdict", "size"),
        n_distinct=("verdict", lambda v: int(v.str.startswith("distinct").sum())),
        n_no_verdict=("verdict", lambda v: int((v == "no verdict").sum())),
    ).reset_index()
    return fits.assign(n_clusters=n_clusters)


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean along the last axis of what is finite; NaN where nothing is."""
    there = np.isfinite(values)
    number = there.sum(axis=-1)
    total = np.where(there, values, 0.0).sum(axis=-1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
