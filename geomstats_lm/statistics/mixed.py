"""Does a relation hold on average over models, when each model has its own?

    y = X beta + Z_1 b_1 + Z_2 b_2 + e,   b_1 ~ N(0, Psi) per model,   b_2 ~ N(0, s_2^2) per
    document

lme4's formulas, fitted by statsmodels' MixedLM. Likelihoods of variance components are flat and
bounded: several optimizers are tried, the best is kept, and what lies on the boundary is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

from geomstats_lm.statistics.cells import LEAVE_OUT
from geomstats_lm.statistics.formula import design, variable_names
from geomstats_lm.statistics.frames import model_frame
from geomstats_lm.statistics.inference import FEW_CLUSTERS
from geomstats_lm.statistics.random_effects import (
    RandomTerm,
    group_codes,
    n_effects,
    refuse_what_cannot_be_fitted,
    split_formula,
    top_group,
)
from geomstats_lm.statistics.results import Result

OPTIMIZERS = ("bfgs", "lbfgs", "cg", "powell")
# the likelihood is flat: the defaults stop in the fifth digit
TIGHT: dict[str, dict[str, float]] = {
    "bfgs": {"gtol": 1e-8},
    "cg": {"gtol": 1e-8},
    "lbfgs": {"pgtol": 1e-9, "factr": 10.0},
}


def mixed_model(
    formula: str,
    data: pd.DataFrame | xr.Dataset,
    *,
    reml: bool = True,
    optimizers: Sequence[str] = OPTIMIZERS,
    level: float = 0.95,
    leave_out: Sequence[str] = LEAVE_OUT,
) -> Result:
    """Linear mixed model with lme4's random-effects syntax.

    Parameters
    ----------
    formula
        "np.log(kl) ~ np.log(residual_norm) * architecture + (1 + np.log(residual_norm) | model)
        + (1 | model:document)".
    data
        Frame or Dataset (dims become columns).
    reml
        Restricted likelihood; False for maximum likelihood.
    optimizers
        Tried in this order; the highest likelihood among those that converged is kept.
    level, leave_out
        As in `rank_correlation`.

    Returns
    -------
    Result
        `tidy()`: rows of `effect` "fixed" (Wald z) and "ran_pars" (standard deviations "sd__...",
        correlations "cor__...", named as broom.mixed names them). `glance()`: likelihood,
        optimizer, `converged`, `singular`. `augment()`: fitted values and residuals.

    Raises
    ------
    ValueError
        A random term that MixedLM cannot express (by name, with what to write instead); what
        `geomstats_lm.statistics.frames.model_frame` refuses; an unknown optimizer.

    Notes
    -----
    Wald tests take the number of groups for large: with fewer than ten models a warning says so,
    and `meta_analysis` with Knapp-Hartung is the safer summary.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> model = np.repeat(np.arange(12), 20)
    >>> frame = pd.DataFrame({"x": rng.normal(size=240), "model": model})
    >>> frame["y"] = frame["x"] + rng.normal(size=12)[model] + 0.5 * rng.normal(size=240)
    >>> table = mixed_model("y ~ x + (1 | model)", frame).tidy()
    >>> table["term"].tolist()
    ['Intercept', 'x', 'sd__(Intercept)', 'sd__Observation']
    """
    unknown = [name for name in optimizers if name not in (*OPTIMIZERS, "nm")]
    if unknown or not optimizers:
        raise ValueError(
            f"optimizers={tuple(optimizers)!r}: choose from {', '.join(OPTIMIZERS)}, nm"
        )
    fixed, terms = split_formula(formula)
    extra = [name for term in terms for name in (*term.group, *variable_names(term.effects))]
    model = model_frame(fixed, data, extra=list(dict.fromkeys(extra)), leave_out=leave_out)
    top = top_group(model.data, terms)
    refuse_what_cannot_be_fitted(terms, top)
    groups = np.zeros(len(model.y), int) if top is None else group_codes(model.data, top.group)
    order = np.argsort(groups, kind="stable")
    frame, groups = model.data.iloc[order].reset_index(drop=True), groups[order]
    random, names, components = _translate(frame, terms, top, groups)
    y, x = model.y[order], model.x.to_numpy()[order]
    specified = MixedLM(y, x, groups=groups, exog_re=random, exog_vc=components)
    fit, tried = _best_fit(specified, reml, optimizers)
    smallest = min(len(np.unique(group_codes(frame, term.group))) for term in terms)
    if smallest < FEW_CLUSTERS:
        warnings.warn(
            f"a random term has {smallest} groups: below {FEW_CLUSTERS} Wald intervals are too "
            "narrow",
            UserWarning,
            stacklevel=2,
        )
    outermost = ":".join(top.group) if top else ""
    covariance, values = _at_the_fit(fit, y, x, random, components)
    error = np.sqrt(np.diag(covariance))
    table, singular = _tidy(fit, error, model.terms, names, components.names, outermost, level)
    converged = bool(fit.converged)
    reason = "" if converged else f"no optimizer converged: {', '.join(tried)}"
    reason = reason or ("a variance or correlation lies on the boundary" if singular else "")
    fits = {
        "formula": formula,
        "n": len(model.y),
        "n_groups": len(np.unique(groups)),
        "log_likelihood": float(fit.llf),
        "reml": reml,
        "sigma": float(np.sqrt(fit.scale)),
        "optimizer": tried[-1],
        "optimizers_tried": ", ".join(tried),
        "converged": converged,
        "singular": singular,
        "n_left_out": model.n_left_out,
        "n_missing": model.n_missing,
        "reason": reason,
    }
    return Result(
        title=f"Mixed model: {formula}",
        estimates=table.assign(n=len(model.y), converged=converged, reason=reason),
        fits=pd.DataFrame([fits]),
        settings={"reml": reml, "level": level},
        observations=lambda: frame.assign(fitted=values, residual=y - values),
        notes=[reason] if reason else [],
    )


def _translate(
    frame: pd.DataFrame, terms: Sequence[RandomTerm], top: RandomTerm | None, groups: np.ndarray
) -> tuple[np.ndarray | None, list[str], VCSpec]:
    """Design of the full-covariance effects with their names, and the variance components."""
    random: np.ndarray | None = None
    names: list[str] = []
    chosen = _full_term(terms, top)
    labels: list[str] = []
    columns: list[list[list[str]]] = []
    matrices: list[list[np.ndarray]] = []
    for term in terms:
        effects = design(term.effects, frame)
        if term is chosen:
            random = effects.to_numpy(float)
            names = [_name(str(effect)) for effect in effects]
            continue
        codes = group_codes(frame, term.group)
        for effect in effects:
            values = effects[effect].to_numpy(float)
            pieces, titles = [], []
            for group in np.unique(groups):
                rows = groups == group
                levels = np.unique(codes[rows])
                pieces.append((codes[rows][:, None] == levels) * values[rows][:, None])
                titles.append([str(level) for level in levels])
            labels.append(f"{_name(str(effect))}|{':'.join(term.group)}")
            matrices.append(pieces)
            columns.append(titles)
    return random, names, VCSpec(labels, columns, matrices)


def _full_term(terms: Sequence[RandomTerm], top: RandomTerm | None) -> RandomTerm | None:
    """The outermost factor's term with the most correlated effects: it has a full covariance."""
    outermost = [term for term in terms if top and term.group == top.group and term.correlated]
    return max(outermost, key=n_effects, default=None)


def _name(effect: str) -> str:
    return "(Intercept)" if effect in ("Intercept", "1") else effect


def _best_fit(model: MixedLM, reml: bool, optimizers: Sequence[str]) -> tuple[Any, list[str]]:
    """The converged fit of highest likelihood, and the optimizers tried, the chosen one last."""
    best: tuple[str, Any] | None = None
    tried = []
    for name in optimizers:
        options = TIGHT.get(name, {})
        with warnings.catch_warnings():
            # convergence and boundary are read off the fit and reported in the result
            warnings.simplefilter("ignore")
            try:
                fit = model.fit(reml=reml, method=name, maxiter=1000, **options)
            except (np.linalg.LinAlgError, ValueError):
                tried.append(name)
                continue
        tried.append(name)
        if not np.isfinite(fit.llf):
            continue
        rank = (bool(fit.converged), float(fit.llf))
        if best is None or rank > (bool(best[1].converged), float(best[1].llf)):
            best = (name, fit)
        # two optimizers that agree are enough
        agree = best[1].converged and fit.converged and abs(fit.llf - best[1].llf) < 1e-9
        if len(tried) >= 2 and agree:
            break
    if best is None:
        raise ValueError(
            f"mixed_model: no optimizer could evaluate the likelihood ({', '.join(tried)})"
        )
    return best[1], [name for name in tried if name != best[0]] + [best[0]]


def _at_the_fit(
    fit: Any, y: np.ndarray, x: np.ndarray, random: np.ndarray | None, components: VCSpec
) -> tuple[np.ndarray, np.ndarray]:
    """(X'V^-1 X)^-1 at the fitted variances, as lme4 has it, and fitted values with random effects.

    statsmodels inverts the Hessian of all parameters instead, which differs in the third digit, and
    predicts no random effects on the boundary. With B B' the part of V above s^2 I,
    V^-1 = (I - B (s^2 I + B'B)^-1 B') / s^2 and the effects are B (s^2 I + B'B)^-1 B'(y - X beta).
    """
    scale = float(fit.scale)
    covariance = np.asarray(fit.cov_re, dtype=float)
    values, vectors = np.linalg.eigh(covariance) if random is not None else (np.empty(0), None)
    information = np.zeros((x.shape[1], x.shape[1]))
    fitted = x @ np.asarray(fit.fe_params)
    for g, label in enumerate(fit.model.group_labels):
        rows = np.asarray(fit.model.row_indices[label])
        blocks = []
        if random is not None:
            blocks.append(random[rows] @ (vectors * np.sqrt(np.maximum(values, 0))))
        for variance, pieces in zip(np.atleast_1d(fit.vcomp), components.mats):
            blocks.append(np.sqrt(max(variance, 0)) * pieces[g])
        b = np.concatenate(blocks, axis=1)
        inner = scale * np.eye(b.shape[1]) + b.T @ b
        cross = b.T @ x[rows]
        information += x[rows].T @ x[rows] - cross.T @ np.linalg.solve(inner, cross)
        fitted[rows] += b @ np.linalg.solve(inner, b.T @ (y[rows] - fitted[rows]))
    return scale * np.linalg.inv(information), fitted


def _tidy(
    fit: Any,
    error: np.ndarray,
    fixed: list[str],
    names: list[str],
    components: list[str],
    group: str,
    level: float,
) -> tuple[pd.DataFrame, bool]:
    beta = np.asarray(fit.fe_params)
    half = stats.norm.ppf((1 + level) / 2) * error
    statistic = beta / error
    table = pd.DataFrame(
        {
            "effect": "fixed",
            "group": "",
            "term": fixed,
            "estimate": beta,
            "std_error": error,
            "conf_low": beta - half,
            "conf_high": beta + half,
            "statistic": statistic,
            "p_value": 2 * stats.norm.sf(np.abs(statistic)),
        }
    )
    rows: list[dict[str, Any]] = []
    covariance = np.asarray(fit.cov_re, dtype=float).reshape(len(names), len(names))
    deviations = np.sqrt(np.maximum(np.diag(covariance), 0))
    for i, name in enumerate(names):
        rows.append({"group": group, "term": f"sd__{name}", "estimate": deviations[i]})
        for j in range(i):
            product = deviations[i] * deviations[j]
            value = covariance[i, j] / product if product > 0 else np.nan
            rows.append({"group": group, "term": f"cor__{names[j]}.{name}", "estimate": value})
    for label, variance in zip(components, np.atleast_1d(fit.vcomp)):
        name, where = label.split("|")
        deviation = float(np.sqrt(max(variance, 0)))
        rows.append({"group": where, "term": f"sd__{name}", "estimate": deviation})
    sigma = float(np.sqrt(fit.scale))
    spread = [row["estimate"] for row in rows if row["term"].startswith("sd__")]
    linked = [row["estimate"] for row in rows if row["term"].startswith("cor__")]
    singular = any(value < 1e-3 * sigma for value in spread) or any(
        not abs(value) < 0.999 for value in linked
    )
    rows.append({"group": "Residual", "term": "sd__Observation", "estimate": sigma})
    random = pd.DataFrame(rows).assign(effect="ran_pars")
    return pd.concat([table, random], ignore_index=True)[list(table)], singular
