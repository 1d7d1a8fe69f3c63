"""What do k estimates of known variance say together, and how much do they differ?

    y_i = x_i beta + u_i + e_i,   u_i ~ N(0, tau^2),  e_i ~ N(0, v_i),   w_i = 1 / (v_i + tau^2)

Everything is written for a design X, of which the plain average (a column of ones) is one case.
With P = W - W X (X'WX)^-1 X'W the estimators of tau^2 differ only in which function of y'Py they
set equal to its expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

METHODS = ("FE", "DL", "PM", "REML")


@dataclass(frozen=True)
class PooledEffects:
    """A fitted meta-regression.

    Attributes
    ----------
    beta, covariance
        Coefficients, shape (p,), and their covariance (p, p), Knapp-Hartung or robust where asked
        for.
    df
        Degrees of freedom of the tests of beta; None means normal.
    tau2, tau2_low, tau2_high
        Variance between studies, and its Q-profile interval.
    q, q_df, q_p_value
        Cochran's Q of what the design leaves.
    i2, h2
        Share of the total variance that lies between studies, in percent; total over sampling
        variance.
    qm, qm_df, qm_p_value
        Test of all coefficients but the intercept; NaN without moderators.
    weights, fitted
        Weights and fitted values, shape (k,).
    """

    beta: np.ndarray
    covariance: np.ndarray
    df: float | None
    tau2: float
    tau2_low: float
    tau2_high: float
    q: float
    q_df: int
    q_p_value: float
    i2: float
    h2: float
    qm: float
    qm_df: int
    qm_p_value: float
    weights: np.ndarray
    fitted: np.ndarray
    converged: bool


def pool_effects(
    y: np.ndarray,
    v: np.ndarray,
    x: np.ndarray | None = None,
    *,
    method: str = "REML",
    knapp_hartung: bool = True,
    cluster: np.ndarray | None = None,
    level: float = 0.95,
) -> PooledEffects:
    """Fixed- or random-effects meta-analysis, with or without moderators.

    Parameters
    ----------
    y, v
        Estimates and their sampling variances, shape (k,).
    x
        Design with its intercept first, shape (k, p); None for the plain average.
    method
        "FE" (tau^2 = 0), "DL" (DerSimonian-Laird), "PM" (Paule-Mandel), "REML".
    knapp_hartung
        Scale the covariance by y'Py/(k - p) and refer to t with k - p degrees of freedom (not for
        "FE").
    cluster
        Studies of one cluster are dependent: cluster-robust covariance with factor m/(m - p) and
        t with m - p degrees of freedom, m the number of clusters. Takes the place of
        Knapp-Hartung.
    level
        Coverage of the interval of tau^2.

    Notes
    -----
    Viechtbauer, *Journal of Statistical Software* 36(3), 2010, whose R package metafor gives the
    same numbers: Q-profile interval of tau^2 (Viechtbauer 2007), Knapp and Hartung (2003), robust
    variance (Hedges, Tipton and Johnson 2010).

    Examples
    --------
    >>> fit = pool_effects(np.array([0.1, 0.3, 0.35, 0.65]), np.array([0.03, 0.03, 0.05, 0.01]))
    >>> fit.beta.round(3), round(fit.tau2, 3)
    (array([0.377]), 0.043)
    """
    k = len(y)
    x = np.ones((k, 1)) if x is None else x
    p = x.shape[1]
    estimator = {"FE": _fixed, "DL": _dersimonian_laird, "PM": _paule_mandel, "REML": _reml}[method]
    tau2, converged = estimator(y, v, x)
    weights = 1 / (v + tau2)
    beta, covariance = _least_squares(y, x, weights)
    fitted = x @ beta
    df: float | None = None
    if cluster is not None:
        covariance, df = _robust_covariance(y - fitted, x, weights, covariance, cluster)
    elif knapp_hartung and method != "FE":
        df = k - p
        covariance = covariance * float(weights @ (y - fitted) ** 2) / df
    q = generalized_q(0.0, y, v, x)
    typical = (k - p) / _trace_p(v, x)
    low, high = (0.0, 0.0) if method == "FE" else tau2_interval(y, v, x, level)
    qm, qm_p_value = np.nan, np.nan
    if p > 1:
        tested = beta[1:]
        qm = float(tested @ np.linalg.solve(covariance[1:, 1:], tested))
        if df is None:
            qm_p_value = float(stats.chi2.sf(qm, p - 1))
        else:
            qm /= p - 1
            qm_p_value = float(stats.f.sf(qm, p - 1, df))
    return PooledEffects(
        beta=beta,
        covariance=covariance,
        df=df,
        tau2=tau2,
        tau2_low=low,
        tau2_high=high,
        q=q,
        q_df=k - p,
        q_p_value=float(stats.chi2.sf(q, k - p)),
        i2=100 * tau2 / (tau2 + typical),
        h2=(tau2 + typical) / typical,
        qm=qm,
        qm_df=p - 1,
        qm_p_value=qm_p_value,
        weights=weights,
        fitted=fitted,
        converged=converged,
    )


def _least_squares(y, x, weights):
    cross = x.T @ (weights[:, None] * x)
    covariance = np.linalg.inv(cross)
    return covariance @ (x.T @ (weights * y)), covariance


def _projection(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """P = W - W X (X'WX)^-1 X'W, shape (k, k)."""
    weighted = weights[:, None] * x
    return np.diag(weights) - weighted @ np.linalg.solve(x.T @ weighted, weighted.T)


def _trace_p(v: np.ndarray, x: np.ndarray) -> float:
    return float(np.trace(_projection(1 / v, x)))


def generalized_q(tau2: float, y: np.ndarray, v: np.ndarray, x: np.ndarray) -> float:
    """y'Py at a value of tau^2: falls as tau^2 grows."""
    weights = 1 / (v + tau2)
    beta, _ = _least_squares(y, x, weights)
    return float(weights @ (y - x @ beta) ** 2)


def _fixed(y, v, x):
    return 0.0, True


def _dersimonian_laird(y, v, x):
    excess = generalized_q(0.0, y, v, x) - (len(y) - x.shape[1])
    return max(0.0, excess / _trace_p(v, x)), True


def _paule_mandel(y, v, x):
    return _solve_q(len(y) - x.shape[1], y, v, x), True


def _solve_q(target: float, y, v, x) -> float:
    """The tau^2 at which the generalized Q equals `target`; 0 where it is below it already."""
    if generalized_q(0.0, y, v, x) <= target:
        return 0.0
    top = 1.0
    while generalized_q(top, y, v, x) > target:
        top *= 4
        if top > 1e12:
            return np.inf
    return float(
        optimize.brentq(
            lambda t: generalized_q(t, y, v, x) - target, 0, top, xtol=1e-14, rtol=1e-14
        )
    )


def tau2_interval(y, v, x, level: float) -> tuple[float, float]:
    """Q-profile interval: the tau^2 that the chi-squared quantiles of Q do not rule out."""
    df = len(y) - x.shape[1]
    low = _solve_q(float(stats.chi2.ppf((1 + level) / 2, df)), y, v, x)
    high = _solve_q(float(stats.chi2.ppf((1 - level) / 2, df)), y, v, x)
    return low, high


def _reml(y, v, x):
    """Fisher scoring from the Hedges estimator, halving steps that would leave tau^2 >= 0."""
    k, p = x.shape
    residual = y - x @ np.linalg.lstsq(x, y)[0]
    hat = x @ np.linalg.solve(x.T @ x, x.T)
    tau2 = max(0.0, float((residual @ residual - (v @ (1 - np.diag(hat)))) / (k - p)))
    for _ in range(200):
        projection = _projection(1 / (v + tau2), x)
        score = float(y @ projection @ projection @ y - np.trace(projection))
        step = score / float(np.trace(projection @ projection))
        while tau2 + step < 0 and abs(step) > 1e-14:
            step /= 2
        tau2 = max(0.0, tau2 + step)
        if abs(step) < 1e-12:
            return (0.0 if tau2 < 1e-10 else tau2), True
    # scoring may cycle where the likelihood is flat: look for its maximum directly
    top = 10 * float(np.var(y) + v.max())
    found = optimize.minimize_scalar(
        lambda t: -_restricted_likelihood(t, y, v, x), bounds=(0, top), method="bounded"
    )
    return float(found.x), bool(found.success)


def _restricted_likelihood(tau2, y, v, x) -> float:
    weights = 1 / (v + tau2)
    _, log_determinant = np.linalg.slogdet(x.T @ (weights[:, None] * x))
    return 0.5 * (np.log(weights).sum() - log_determinant - generalized_q(tau2, y, v, x))


def _robust_covariance(residual, x, weights, bread, cluster):
    """bread (sum_c s_c s_c') bread * m / (m - p), s_c = X_c' W_c e_c."""
    _, code = np.unique(cluster, return_inverse=True)
    m, p = int(code.max()) + 1, x.shape[1]
    scores = np.zeros((m, p))
    np.add.at(scores, code, (weights * residual)[:, None] * x)
    return bread @ (scores.T @ scores) @ bread * m / (m - p), m - p
