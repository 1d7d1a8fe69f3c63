"""How does the response move with several predictors at once?

    E(y | x) = x beta   or   Q_q(y | x) = x beta_q

Formulas as in R; standard errors that know of clusters. For predictors of a rank correlation's
kind take logarithms, or quantiles, which outliers do not move.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats
from statsmodels.regression.quantile_regression import QuantReg
from statsmodels.tools.sm_exceptions import IterationLimitWarning

from geomstats_lm.statistics.cells import LEAVE_OUT
from geomstats_lm.statistics.cluster_robust import KINDS, cluster_robust
from geomstats_lm.statistics.frames import ModelFrame, model_frame
from geomstats_lm.statistics.inference import infer, warn_of_few
from geomstats_lm.statistics.resampling import draw_counts
from geomstats_lm.statistics.results import Result


def ols(
    formula: str,
    data: pd.DataFrame | xr.Dataset,
    *,
    cluster: str | None = "document",
    vcov: str = "CR2",
    level: float = 0.95,
    leave_out: Sequence[str] = LEAVE_OUT,
) -> Result:
    """Least squares with cluster-robust standard errors.

    Parameters
    ----------
    formula
        "response ~ terms".
    data
        Frame or Dataset (dims become columns).
    cluster, vcov
        Column of clusters, and "CR1" or "CR2". cluster=None gives classical standard errors.
    level, leave_out
        As in `rank_correlation`.

    Returns
    -------
    Result
        One row per coefficient, with the degrees of freedom `df` of its t-test.

    Raises
    ------
    ValueError
        See `geomstats_lm.statistics.frames.model_frame`; unknown vcov; fewer than two clusters.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> frame = pd.DataFrame({"x": rng.normal(size=200), "document": np.repeat(np.arange(20), 10)})
    >>> frame["y"] = 2 * frame["x"] + rng.normal(size=200)
    >>> ols("y ~ x", frame).tidy()[["term", "estimate", "n_clusters"]].round(1)
            term  estimate  n_clusters
    0  Intercept      -0.1          20
    1          x       1.9          20
    """
    if vcov not in KINDS:
        raise ValueError(f"vcov={vcov!r} is not one of {', '.join(KINDS)}")
    model = model_frame(formula, data, extra=[cluster] if cluster else [], leave_out=leave_out)
    x, y = model.x.to_numpy(), model.y
    n, p = x.shape
    beta = np.linalg.lstsq(x, y)[0]
    residual = y - x @ beta
    if cluster is None:
        covariance = np.linalg.inv(x.T @ x) * (residual @ residual) / (n - p)
        df, n_clusters = np.full(p, float(n - p)), n
    else:
        n_clusters = model.data[cluster].nunique()
        if n_clusters < 2:
            raise ValueError(f"cluster={cluster!r} has {n_clusters} label: at least 2 are needed")
        covariance, df = cluster_robust(x, residual, model.data[cluster].to_numpy(), vcov)
        warn_of_few([n_clusters])
    table = coefficient_table(model.terms, beta, np.sqrt(np.diag(covariance)), df, level)
    table = table.assign(n=n, n_clusters=n_clusters, converged=True, reason="")
    centred = y - y.mean() if "Intercept" in model.x else y
    r2 = 1 - (residual @ residual) / (centred @ centred)
    fits = {
        "formula": formula,
        "n": n,
        "n_clusters": n_clusters,
        "r2": r2,
        "sigma": np.sqrt(residual @ residual / (n - p)),
        "df_residual": n - p,
        "vcov": vcov if cluster else "classical",
        **_counted(model),
    }
    return Result(
        title=f"Least squares: {formula}",
        estimates=table,
        fits=pd.DataFrame([fits]),
        settings={"cluster": cluster, "vcov": fits["vcov"], "level": level},
        observations=lambda: model.data.assign(fitted=x @ beta, residual=residual),
        notes=[
            f"Standard errors: {fits['vcov']}" + (f", clustered by {cluster}." if cluster else ".")
        ],
    )


def coefficient_table(
    terms: Sequence[str], beta: np.ndarray, error: np.ndarray, df: np.ndarray, level: float
) -> pd.DataFrame:
    """Rows of broom's columns from coefficients, standard errors and degrees of freedom."""
    statistic = beta / error
    half = stats.t.ppf((1 + level) / 2, df) * error
    return pd.DataFrame(
        {
            "term": list(terms),
            "estimate": beta,
            "std_error": error,
            "conf_low": beta - half,
            "conf_high": beta + half,
            "statistic": statistic,
            "df": df,
            "p_value": 2 * stats.t.sf(np.abs(statistic), df),
        }
    )


def _counted(model: ModelFrame) -> dict[str, int]:
    return {"n_left_out": model.n_left_out, "n_missing": model.n_missing}


def quantile_regression(
    formula: str,
    data: pd.DataFrame | xr.Dataset,
    *,
    quantiles: Sequence[float] = (0.5,),
    cluster: str | None = "document",
    n_boot: int = 200,
    interval: str = "percentile",
    level: float = 0.95,
    seed: int = 0,
    leave_out: Sequence[str] = LEAVE_OUT,
) -> Result:
    """Linear quantile regression, with intervals from clusters drawn with replacement.

    Parameters
    ----------
    formula, data, level, leave_out
        As in `ols`.
    quantiles
        Each in (0, 1); all are fitted on the same resamples.
    cluster, n_boot, seed
        As in `rank_correlation`; cluster=None takes statsmodels' kernel standard errors instead.
    interval
        "percentile" or "basic".

    Returns
    -------
    Result
        One row per quantile and coefficient.

    Raises
    ------
    ValueError
        As `ols`; a quantile outside (0, 1).

    Notes
    -----
    statsmodels' iteratively reweighted fit, moved to the exact vertex of the linear program
    nearest to it (Koenker, *Quantile Regression*, 2005, section 2.2).

    Examples
    --------
    >>> frame = pd.DataFrame({"x": np.arange(40.0), "document": np.repeat(np.arange(10), 4)})
    >>> frame["y"] = 3 * frame["x"] + np.tile([-1.0, 0.0, 0.0, 1.0], 10)
    >>> quantile_regression("y ~ x", frame, n_boot=50).tidy()["estimate"].round(6).tolist()
    [0.0, 3.0]
    """
    outside = [q for q in quantiles if not 0 < q < 1]
    if outside or not len(quantiles):
        raise ValueError(f"quantiles={quantiles!r}: each must lie between 0 and 1")
    if interval not in ("percentile", "basic"):
        raise ValueError(f"interval={interval!r} is not one of percentile, basic")
    model = model_frame(formula, data, extra=[cluster] if cluster else [], leave_out=leave_out)
    x, y, terms = model.x.to_numpy(), model.y, model.terms
    tables = []
    if cluster is None:
        for q in quantiles:
            fit = _statsmodels_fit(y, x, q)
            df = np.full(len(terms), float(len(y) - len(terms)))
            table = coefficient_table(terms, exact_quantile_fit(y, x, q), fit.bse, df, level)
            tables.append(table.assign(quantile=q, n=len(y), n_clusters=len(y), converged=True))
    else:
        codes, labels = pd.factorize(model.data[cluster], sort=True)
        counts = draw_counts(len(labels), n_boot, seed=seed)
        warn_of_few([len(labels)])
        for q in quantiles:
            beta = exact_quantile_fit(y, x, q)
            replicates = np.full((len(terms), n_boot), np.nan)
            for b in range(n_boot):
                rows = np.repeat(np.arange(len(y)), counts[codes, b])
                if np.linalg.matrix_rank(x[rows]) == x.shape[1]:
                    replicates[:, b] = exact_quantile_fit(y[rows], x[rows], q)
            rows_of_q: list[dict[str, Any]] = [
                {
                    "term": term,
                    **infer(
                        float(beta[j]),
                        replicates[j],
                        n_clusters=len(labels),
                        kind=interval,
                        level=level,
                        bounded=False,
                    ),
                    "quantile": q,
                    "n": len(y),
                    "n_clusters": len(labels),
                }
                for j, term in enumerate(terms)
            ]
            tables.append(pd.DataFrame(rows_of_q))
    table = pd.concat(tables, ignore_index=True)
    first = ["quantile", "term"]
    fits = {
        "formula": formula,
        "n": len(y),
        "cluster": cluster,
        "n_boot": n_boot,
        **_counted(model),
    }
    return Result(
        title=f"Quantile regression: {formula}",
        estimates=table[first + [name for name in table if name not in first]],
        fits=pd.DataFrame([fits]),
        settings={"quantiles": tuple(quantiles), "cluster": cluster, "level": level, "seed": seed},
        observations=lambda: model.data.assign(
            **{f"fitted_{q:g}": x @ exact_quantile_fit(y, x, q) for q in quantiles}
        ),
    )


def _statsmodels_fit(y: np.ndarray, x: np.ndarray, q: float) -> Any:
    with warnings.catch_warnings():
        # the vertex search below finishes what the iterations leave
        warnings.simplefilter("ignore", IterationLimitWarning)
        return QuantReg(y, x).fit(q=q, max_iter=2000)


def exact_quantile_fit(y: np.ndarray, x: np.ndarray, q: float) -> np.ndarray:
    """Coefficients (p,) that minimize the check loss: an exact fit through p of the points."""
    beta = np.asarray(_statsmodels_fit(y, x, q).params)
    best = _check_loss(y - x @ beta, q)
    n, p = x.shape
    for _ in range(20):
        near = np.argsort(np.abs(y - x @ beta))[: min(n, 4 * p)]
        moved = False
        for rows in _bases(x, near, p):
            vertex = np.linalg.solve(x[rows], y[rows])
            loss = _check_loss(y - x @ vertex, q)
            if loss < best - 1e-12 * max(best, 1e-300):
                beta, best, moved = vertex, loss, True
        if not moved:
            break
    return beta


def _check_loss(residual: np.ndarray, q: float) -> float:
    return float(np.sum(residual * (q - (residual < 0))))


def _bases(x: np.ndarray, near: np.ndarray, p: int):
    """Independent sets of p of the nearest rows: a start by pivoting, then one row exchanged."""
    chosen: list[int] = []
    for row in near:
        if np.linalg.matrix_rank(x[[*chosen, row]]) > len(chosen):
            chosen.append(row)
        if len(chosen) == p:
            break
    if len(chosen) < p:
        return
    yield chosen
    for out in range(p):
        for row in near:
            swapped = [*chosen[:out], row, *chosen[out + 1 :]]
            if row not in chosen and np.linalg.matrix_rank(x[swapped]) == p:
                yield swapped
