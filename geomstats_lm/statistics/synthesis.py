"""Does it hold across models, and how much do models differ?

    z_m = arctanh(rho_m),   z_m ~ N(mu, v_m + tau^2),   v_m = var_b(arctanh(rho_mb))

One model's correlation is one observation here: its interval speaks of other documents, the
synthesis of other models. The prediction interval says where the next model's correlation is to
be expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from geomstats_lm.statistics.formula import check_known, design
from geomstats_lm.statistics.inference import fisher_z
from geomstats_lm.statistics.multiplicity import adjust_frame, check_method
from geomstats_lm.statistics.pooled_effects import METHODS, PooledEffects, pool_effects
from geomstats_lm.statistics.results import Result

STUDIES_PER_MODERATOR = 10


@dataclass(repr=False)
class MetaAnalysis(Result):
    """A synthesis of estimates; see `meta_analysis`.

    Attributes
    ----------
    studies
        The estimates that entered, with `y` and `v` on the scale of the synthesis.
    """

    studies: pd.DataFrame = None  # type: ignore[assignment]

    def leave_one_out(self) -> pd.DataFrame:
        """The synthesis without each study in turn: one row per group and study left out."""
        rows = []
        for key, group in _split(self.studies, self.settings["by"]):
            for i in range(len(group)):
                kept = group.drop(index=group.index[i])
                table, fit = _synthesize(kept, self.settings)
                left = {"left_out": group[self.settings["over"]].iloc[i]}
                rows += [
                    {**key, **left, **row, "tau2": fit["tau2"], "i2": fit["i2"]} for row in table
                ]
        return pd.DataFrame(rows)

    def subgroups(self, column: str) -> pd.DataFrame:
        """A synthesis within each level of a column, and the test that they agree.

        Every subgroup has its own tau^2; `q_between` compares their averages,
        sum_g (mu_g - mu)^2 / se_g^2 on chi^2 with (levels - 1) degrees of freedom.

        Raises
        ------
        ValueError
            Unknown column, a level with fewer than two studies, or a fit with moderators.
        """
        check_known([column], self.studies.columns, "subgroups")
        if self.settings["moderators"]:
            raise ValueError("subgroups: fit without moderators first; they are another comparison")
        rows = []
        for key, group in _split(self.studies, self.settings["by"]):
            parts = []
            for level, part in group.groupby(column, sort=True):
                if len(part) < 2:
                    raise ValueError(f"subgroups: {column}={level!r} has 1 study, 2 are needed")
                ((row,), fit) = _synthesize(part, self.settings)
                parts.append({**key, column: level, **row, "tau2": fit["tau2"], "k": fit["k"]})
            mu = np.array([part["estimate_z"] for part in parts])
            weight = 1 / np.array([part["std_error_z"] for part in parts]) ** 2
            q = float(weight @ (mu - weight @ mu / weight.sum()) ** 2)
            test = {
                "q_between": q,
                "q_df": len(parts) - 1,
                "q_p_value": float(stats.chi2.sf(q, len(parts) - 1)) if len(parts) > 1 else np.nan,
            }
            rows += [{**part, **test} for part in parts]
        return pd.DataFrame(rows)


def meta_analysis(
    estimates: Result | pd.DataFrame,
    *,
    over: str = "model",
    by: str | Sequence[str] | None = None,
    method: str = "REML",
    knapp_hartung: bool = True,
    transform: str | None = "fisher_z",
    moderators: str | None = None,
    robust: str | None = None,
    level: float = 0.95,
    adjust: str | None = "fdr_bh",
) -> MetaAnalysis:
    """Fixed- or random-effects synthesis of estimates over models.

    Parameters
    ----------
    estimates
        A result of this package, or any frame with `estimate` and `std_error`.
    over
        Column whose labels are the studies.
    by
        Columns whose combinations are synthesized apart; None takes a result's own by-columns but
        `over`, and nothing for a frame.
    method
        "REML", "DL" (DerSimonian-Laird), "PM" (Paule-Mandel), or "FE" (common effect).
    knapp_hartung
        t-based intervals that allow for the uncertainty of tau^2 (random effects).
    transform
        "fisher_z" for correlations: bootstrap replicates give the variance of arctanh where they
        exist, else std_error / (1 - estimate^2). None takes estimates as they are.
    moderators
        Right side of a formula over columns of the estimates, "~ architecture + log(parameters)".
    robust
        Column of clusters of dependent estimates (several layers of one model): cluster-robust
        variance.
    level, adjust
        Coverage, and the adjustment of p-values over the groups of `by`, each term a family.

    Returns
    -------
    MetaAnalysis
        `tidy()`: one row per group and coefficient, with prediction interval; `glance()`: Q, I^2,
        tau^2 and its interval per group; `augment()`: weights and residuals; `leave_one_out()`;
        `subgroups()`.

    Raises
    ------
    ValueError
        Missing columns, several rows per study and group without `robust`, too few studies for the
        moderators (the number needed is given), correlations outside (-1, 1).

    Notes
    -----
    After Viechtbauer (2010); see `geomstats_lm.statistics.pooled_effects.pool_effects`. Estimates
    without a positive standard error are left out and counted.

    Examples
    --------
    >>> frame = pd.DataFrame({"model": list("abcd"), "estimate": [0.5, 0.6, 0.7, 0.65]})
    >>> frame["std_error"] = [0.05, 0.05, 0.04, 0.03]
    >>> meta_analysis(frame).tidy()[["estimate", "conf_low", "conf_high", "k"]].round(2)
       estimate  conf_low  conf_high  k
    0      0.62      0.47       0.73  4
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if transform not in ("fisher_z", None):
        raise ValueError(f"transform={transform!r} is not 'fisher_z' or None")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} is not between 0 and 1")
    check_method(adjust)
    by = _groups(estimates, over, by)
    studies = _studies(estimates, over, by, transform, robust)
    settings = {
        "over": over,
        "by": by,
        "method": method,
        "knapp_hartung": knapp_hartung and method != "FE",
        "transform": transform,
        "moderators": moderators,
        "robust": robust,
        "level": level,
    }
    rows, fits = [], []
    for key, group in _split(studies, by):
        usable = group[group["usable"]]
        table, fit = _synthesize(usable, settings)
        rows += [{**key, **row} for row in table]
        fits.append({**key, **fit, "n_left_out": int((~group["usable"]).sum())})
    frame = adjust_frame(pd.DataFrame(rows), adjust, over=by, by=(*by, "term"))
    last = ["converged", "reason"]
    kept = studies[studies["usable"]]
    return MetaAnalysis(
        title=f"Synthesis over {over}s ({method})",
        estimates=frame[[name for name in frame if name not in last] + last],
        fits=pd.DataFrame(fits),
        settings=settings,
        observations=lambda: _augmented(kept, settings),
        notes=_notes(settings, kept, by),
        studies=kept.drop(columns="usable"),
    )


def _groups(
    estimates: Result | pd.DataFrame, over: str, by: str | Sequence[str] | None
) -> tuple[str, ...]:
    if by is None:
        return tuple(name for name in getattr(estimates, "by", ()) if name != over)
    return (by,) if isinstance(by, str) else tuple(by)


def _studies(
    estimates: Result | pd.DataFrame,
    over: str,
    by: tuple[str, ...],
    transform: str | None,
    robust: str | None,
) -> pd.DataFrame:
    frame = estimates.tidy() if isinstance(estimates, Result) else estimates
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"estimates: expected a result or a frame, got {type(estimates).__name__}")
    check_known(["estimate", "std_error"], frame.columns, "estimates")
    check_known([over, *by, *([robust] if robust else [])], frame.columns, "meta_analysis")
    frame = frame.reset_index(drop=True)
    if robust is None and frame.duplicated([*by, over]).any():
        raise ValueError(
            f"several rows of one {over!r} in one group: name in by= the columns that tell them "
            f"apart, or give robust={over!r} for a variance that allows for their dependence"
        )
    estimate, error = frame["estimate"].to_numpy(float), frame["std_error"].to_numpy(float)
    usable = np.isfinite(estimate) & np.isfinite(error) & (error > 0)
    y, v = estimate, error**2
    if transform == "fisher_z":
        if np.any(np.abs(estimate[usable]) > 1):
            raise ValueError("transform='fisher_z' is for correlations; use transform=None")
        usable &= np.abs(estimate) < 1
        slope = np.where(usable, 1 - estimate**2, 1.0)
        y = fisher_z(np.where(usable, estimate, 0.0))
        v = (error / slope) ** 2
        replicates = (
            estimates.replicates.values if isinstance(estimates, Result) else np.empty((0, 0))
        )
        if replicates.shape[0] == len(frame) and replicates.shape[1] > 1:
            v = np.array([_variance(fisher_z(row)) for row in replicates])
            usable &= v > 0
    return frame.assign(y=np.where(usable, y, np.nan), v=np.where(usable, v, np.nan), usable=usable)


def _variance(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.var(finite, ddof=1)) if finite.size > 1 else 0.0


def _split(frame: pd.DataFrame, by: Sequence[str]):
    if not by:
        yield {}, frame
        return
    for values, group in frame.groupby(list(by), sort=False, dropna=False):
        yield dict(zip(by, values)), group


def _synthesize(
    studies: pd.DataFrame, settings: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Coefficients and fit of one group."""
    k, level = len(studies), settings["level"]
    x, terms = _design(studies, settings)
    if k < 2 or k <= len(terms):
        empty = dict.fromkeys(
            ("estimate", "std_error", "conf_low", "conf_high", "statistic", "p_value"), np.nan
        )
        reason = f"{k} usable estimates: at least {len(terms) + 1} are needed"
        row = {**empty, "k": k, "converged": False, "reason": reason}
        return [{"term": term, **row} for term in terms], {"k": k, "reason": reason}
    fit = _fit(studies, x, settings)
    rows = []
    for j, term in enumerate(terms):
        mean, error = float(fit.beta[j]), float(np.sqrt(fit.covariance[j, j]))
        critical = float(
            stats.norm.ppf((1 + level) / 2)
            if fit.df is None
            else stats.t.ppf((1 + level) / 2, fit.df)
        )
        # Knapp-Hartung's variance is zero where all estimates agree to the last digit
        degenerate = error <= 1e-12 * max(abs(mean), 1.0)
        reason = "all estimates are equal" if degenerate else ""
        statistic = np.nan if degenerate else mean / error
        tail = (
            stats.norm.sf(abs(statistic)) if fit.df is None else stats.t.sf(abs(statistic), fit.df)
        )
        spread = critical * np.sqrt(error**2 + fit.tau2)
        # coefficients of moderators have no meaning on the scale of correlations
        bounded = settings["transform"] is not None and len(terms) == 1
        back: Callable[[float], float] = np.tanh if bounded else float
        slope = 1 - np.tanh(mean) ** 2 if bounded else 1.0
        row = {
            "term": term,
            "estimate": back(mean),
            "std_error": error * slope,
            "conf_low": back(mean - critical * error),
            "conf_high": back(mean + critical * error),
            "pred_low": back(mean - spread) if len(terms) == 1 else np.nan,
            "pred_high": back(mean + spread) if len(terms) == 1 else np.nan,
            "statistic": statistic,
            "p_value": float(2 * tail),
            "df": np.inf if fit.df is None else fit.df,
            "estimate_z": mean,
            "std_error_z": error,
            "k": k,
            "converged": fit.converged,
            "reason": reason if fit.converged else "tau2 did not converge",
        }
        rows.append(row)
    return rows, {
        "k": k,
        "method": settings["method"],
        "tau2": fit.tau2,
        "tau2_low": fit.tau2_low,
        "tau2_high": fit.tau2_high,
        "i2": fit.i2,
        "h2": fit.h2,
        "q": fit.q,
        "q_df": fit.q_df,
        "q_p_value": fit.q_p_value,
        "qm": fit.qm,
        "qm_df": fit.qm_df,
        "qm_p_value": fit.qm_p_value,
        "converged": fit.converged,
        "reason": "",
    }


def _design(studies: pd.DataFrame, settings: dict[str, Any]) -> tuple[np.ndarray, list[str]]:
    moderators = settings["moderators"]
    if moderators is None:
        return np.ones((len(studies), 1)), ["overall"]
    matrix = design(moderators.replace("~", "").strip(), studies)
    if matrix.isna().any().any():
        missing = studies.loc[matrix.isna().any(axis=1).to_numpy(), settings["over"]].tolist()
        raise ValueError(f"moderators={moderators!r}: no value for {missing}")
    k, p = matrix.shape
    if k < p + 2:
        raise ValueError(
            f"moderators={moderators!r} have {p} coefficients, which need at least {p + 2} "
            f"estimates; there are {k}"
        )
    if np.linalg.matrix_rank(matrix.to_numpy(float)) < p:
        raise ValueError(
            f"moderators={moderators!r}: the columns {list(matrix)} are not independent"
        )
    if k < STUDIES_PER_MODERATOR * (p - 1):
        warnings.warn(
            f"{k} estimates for {p - 1} moderator coefficients: with fewer than "
            f"{STUDIES_PER_MODERATOR} for each, slopes are easily chance",
            UserWarning,
            stacklevel=4,
        )
    return matrix.to_numpy(float), [str(name) for name in matrix]


def _fit(studies: pd.DataFrame, x: np.ndarray, settings: dict[str, Any]) -> PooledEffects:
    robust = settings["robust"]
    cluster = None if robust is None else studies[robust].to_numpy()
    if cluster is not None and len(set(cluster)) <= x.shape[1]:
        raise ValueError(
            f"robust={robust!r} has {len(set(cluster))} clusters: at least {x.shape[1] + 1} are "
            "needed"
        )
    return pool_effects(
        studies["y"].to_numpy(float),
        studies["v"].to_numpy(float),
        x,
        method=settings["method"],
        knapp_hartung=settings["knapp_hartung"],
        cluster=cluster,
        level=settings["level"],
    )


def _augmented(studies: pd.DataFrame, settings: dict[str, Any]) -> pd.DataFrame:
    parts = []
    for _, group in _split(studies, settings["by"]):
        x, terms = _design(group, settings)
        if len(group) <= len(terms):
            continue
        fit = _fit(group, x, settings)
        group = group.drop(columns="usable").assign(
            weight=100 * fit.weights / fit.weights.sum(), fitted=fit.fitted
        )
        parts.append(group.assign(residual=group["y"] - fit.fitted))
    return pd.concat(parts, ignore_index=True)


def _notes(settings: dict[str, Any], studies: pd.DataFrame, by: tuple[str, ...]) -> list[str]:
    notes = []
    if settings["transform"] == "fisher_z":
        notes.append(
            "Synthesized as Fisher z; "
            + (
                "coefficients are on that scale."
                if settings["moderators"]
                else "estimates and intervals are transformed back, tau2 is on the z scale."
            )
        )
    smallest = studies.groupby(list(by)).size().min() if by else len(studies)
    if smallest < 5:
        notes.append(
            f"As few as {smallest} estimates: tau2 and the prediction interval are guesses."
        )
    return notes
