"""What may be said of one correlation, given its replicates?

    std_error = sd(rho_b),   statistic = rho / std_error,   p_value = 2 P(T_{G-1} > |statistic|)

One place turns replicates into the columns of a table, for single cells and for pools of them
alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import stats

from geomstats_lm.statistics.resampling import bootstrap_interval

FEW_CLUSTERS = 10
UNDEFINED = {
    "std_error": np.nan,
    "conf_low": np.nan,
    "conf_high": np.nan,
    "statistic": np.nan,
    "p_value": np.nan,
}


def fisher_z(correlation: np.ndarray | float) -> Any:
    """arctanh, with |r| = 1 held at the last double before it."""
    return np.arctanh(np.clip(correlation, -1 + 1e-15, 1 - 1e-15))


def infer(
    estimate: float,
    replicates: np.ndarray,
    *,
    n_clusters: int,
    kind: str = "percentile",
    level: float = 0.95,
    jackknife: np.ndarray | None = None,
    z_std_error: float | None = None,
    z_std_errors: np.ndarray | None = None,
    reason: str = "",
    bounded: bool = True,
    null: float = 0.0,
) -> dict[str, Any]:
    """Columns of one row: standard error, interval, test, diagnostics.

    Parameters
    ----------
    estimate
        A correlation, or NaN.
    replicates
        Its value in each resample, shape (n_boot,); may be empty with kind "robust".
    n_clusters
        Clusters that have observations in the cell.
    kind, level, jackknife
        As in `geomstats_lm.statistics.resampling.bootstrap_interval`.
    z_std_error, z_std_errors
        Analytic standard error of arctanh(estimate), and of each replicate, for "robust" and
        "bootstrap-t".
    reason
        Why the estimate is missing, if it is.
    bounded
        The estimate is a correlation: intervals that depend on the scale use arctanh.
    null
        Value that the test compares the estimate with.
    """
    replicates = np.asarray(replicates, dtype=float)
    row: dict[str, Any] = {"estimate": float(estimate), **UNDEFINED}
    row["n_degenerate"] = int(np.sum(~np.isfinite(replicates)))
    row["interval"] = kind
    if not np.isfinite(estimate) or n_clusters < 2:
        if np.isfinite(estimate):
            reason = "one cluster: its variation cannot be seen"
        return {**row, "converged": False, "reason": reason or "not defined"}
    if kind == "robust":
        row |= _robust(float(estimate), z_std_error, n_clusters, level)
    elif replicates.size == 0:
        return {**row, "interval": "none", "converged": True, "reason": reason}
    else:
        low, high, used, why = bootstrap_interval(
            float(estimate),
            replicates,
            kind=kind,
            level=level,
            jackknife=jackknife,
            std_error=z_std_error,
            replicate_std_errors=z_std_errors,
            fisher_z=bounded,
        )
        reason = why or reason
        row |= {"conf_low": low, "conf_high": high, "interval": used}
        row |= _test(float(estimate) - null, replicates, n_clusters)
    row["converged"] = bool(np.isfinite(row["conf_low"]) and np.isfinite(row["conf_high"]))
    if row["converged"] and row["std_error"] < 1e-12:
        reason = "every resample gives the same value"
    if n_clusters < FEW_CLUSTERS and not reason:
        reason = f"fewer than {FEW_CLUSTERS} clusters: the interval is too narrow"
    return {**row, "reason": reason}


def _test(distance: float, replicates: np.ndarray, n_clusters: int) -> dict[str, float]:
    finite = replicates[np.isfinite(replicates)]
    if finite.size < 2:
        return {}
    std_error = float(np.std(finite, ddof=1))
    if std_error < 1e-12:
        # a perfect or a constant relation: there is nothing to scale a statistic by
        return {"std_error": std_error}
    statistic = distance / std_error
    return {"std_error": std_error, "statistic": statistic, "p_value": _p(statistic, n_clusters)}


def _robust(
    estimate: float, z_std_error: float | None, n_clusters: int, level: float
) -> dict[str, float]:
    if z_std_error is None or not np.isfinite(z_std_error):
        return {}
    z = float(fisher_z(estimate))
    half = stats.t.ppf((1 + level) / 2, n_clusters - 1) * z_std_error
    row = {
        "std_error": z_std_error * (1 - estimate**2),
        "conf_low": float(np.tanh(z - half)),
        "conf_high": float(np.tanh(z + half)),
    }
    if z_std_error > 1e-12:
        statistic = z / z_std_error
        row |= {"statistic": statistic, "p_value": _p(statistic, n_clusters)}
    return row


def _p(statistic: float, n_clusters: int) -> float:
    return float(2 * stats.t.sf(abs(statistic), n_clusters - 1))


def warn_of_few(numbers: Iterable[int]) -> None:
    """One warning for a whole table, when some of its rows rest on few clusters."""
    few = [number for number in numbers if 2 <= number < FEW_CLUSTERS]
    if few:
        warnings.warn(
            f"{len(few)} estimates rest on fewer than {FEW_CLUSTERS} clusters (the smallest on "
            f"{min(few)}): their intervals are too narrow, whatever their kind",
            UserWarning,
            stacklevel=3,
        )
