"""What does the study say, in one plain sentence a question?

Every sentence is made of estimates and interval ends alone: which words it uses follows from where
the interval lies, so that other data give another sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from geomstats_lm.findings import BASELINES, Findings, ModelFindings
from geomstats_lm.main_table import CONTROL_NAMES

HOW = {"single": "one position at a time", "all": "all positions at once"}


def share_sentence(findings: Findings) -> str:
    """How much of the update is tokenwise.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    str
    """
    parts = []
    for model in findings.models:
        row = _late(model.pooled_share, model.main_class)
        if row is None:
            continue
        low, high, estimate = row["conf_low"], row["conf_high"], row["estimate"]
        if not np.isfinite([low, high]).all():
            words = "explains"
        elif high < 0:
            words = "predicts worse than a constant update would: it explains"
        elif low <= 0:
            words = "cannot be told from a constant update: it explains"
        elif low > 0.5:
            words = "explains most of the update's variation about its mean,"
        elif high < 0.5:
            words = "explains less than half of the update's variation about its mean,"
        else:
            words = "explains about half of the update's variation about its mean,"
        of = "" if "variation" in words else " of the update's variation about its mean"
        parts.append(
            f"in {model.key} the map {model.main_class} {words} "
            f"{_share(estimate, low, high)}{of} (mean over {row['layer_group']})"
            f"{_baseline(model)}"
        )
    return _joined(parts, findings, "how much of the update is tokenwise cannot be said")


def _baseline(model: ModelFindings) -> str:
    """The best of the constant updates beside it."""
    table = model.pooled_share
    if table is None:
        return ""
    late = table[table["layer_group"] != "layer 1"]
    late = late[
        late["function_class"].isin([b for b in BASELINES if b not in ("identity", "mean")])
    ]
    late = late.dropna(subset=["estimate"])
    if not len(late) or model.main_class in BASELINES:
        return ""
    best = late.iloc[int(np.argmax(late["estimate"].to_numpy(float)))]
    return f", beside {_share(best['estimate'], np.nan, np.nan)} of {best['function_class']}"


def distinct_sentence(findings: Findings) -> str:
    """Whether the residual's angle is more than its size and a random direction give.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    str
    """
    parts = []
    for model in findings.models:
        rows = _angles(model)
        if rows is None or not len(rows):
            continue
        judged = rows[rows["verdict"] != "no verdict"]
        above = int(judged["verdict"].str.endswith("above").sum())
        below = int(judged["verdict"].str.endswith("below").sum())
        none = len(rows) - len(judged)
        if not len(judged):
            parts.append(f"in {model.key} no layer allows a verdict ({_reason(rows)})")
            continue
        if above + below == 0:
            words = "nowhere distinct from"
        elif above + below == len(judged):
            words = f"distinct in all {len(judged)} layers from"
        else:
            words = f"distinct in {above + below} of {len(judged)} layers from"
        text = (
            f"in {model.key} the residual of {model.main_class} is {words} a random direction of "
            f"its size: its angle to the tokenwise part differs from the forced one by "
            f"{judged['estimate'].mean():+.1f} degrees on average (intervals of layers from "
            f"{judged['conf_low'].min():+.1f} to {judged['conf_high'].max():+.1f})"
        )
        if below > above:
            text += ", smaller in most of these: what is missed still points along the fit"
        elif above > below:
            text += ", larger in most of these: the fit overshoots"
        if none:
            text += f"; {none} layers allow no verdict"
        parts.append(text)
    return _joined(parts, findings, "whether the residual is distinct cannot be said")


def _angles(model: ModelFindings) -> pd.DataFrame | None:
    if model.geometry is None:
        return None
    frame = model.geometry
    wanted = (frame["measure"] == "angle_residual_tokenwise") & (frame["null"] == "forced")
    return frame[wanted & (frame["function_class"] == model.main_class) & (frame["verdict"] != "")]


def correlation_sentence(findings: Findings) -> str:
    """Whether tokens with larger residuals do more damage.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    str
    """
    parts = []
    for model in findings.models:
        result = model.pooled_correlation
        if result is None:
            continue
        clauses: dict[str, list[str]] = {}
        for mode, row in _modes(result.tidy(), model.main_class):
            low, high = row["conf_low"], row["conf_high"]
            number = f"{str(row['method']).capitalize()} {_number(row['estimate'], low, high)}"
            if not np.isfinite(row["estimate"]):
                words, number = "there is no correlation", str(row["reason"] or "no estimate")
            elif not np.isfinite([low, high]).all():
                words = "how surely residual and damage go together cannot be told"
            elif low > 0:
                words = "tokens with larger residuals do more damage"
            elif high < 0:
                words = "tokens with larger residuals do less damage"
            else:
                words = "size of residual and damage cannot be told to go together"
            clauses.setdefault(words, []).append(f"{HOW[mode]} ({number}, {row['layer_group']})")
        parts += _clauses(model, clauses)
    return _joined(parts, findings, "whether residual and damage go together cannot be said")


def control_sentence(findings: Findings) -> str:
    """Whether the residual does more damage than its control.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    str
    """
    parts = []
    for model in findings.models:
        if model.pooled_ratio is None:
            continue
        clauses: dict[str, list[str]] = {}
        for mode, row in _modes(model.pooled_ratio, model.main_class):
            low, high = row["conf_low"], row["conf_high"]
            control = CONTROL_NAMES.get(str(row["control"]), str(row["control"]))
            number = f"{_number(row['estimate'], low, high)} times as much"
            if not np.isfinite(row["estimate"]):
                words, number = "there is no ratio to", str(row["reason"] or "no estimate")
            elif not np.isfinite([low, high]).all():
                words = "it cannot be told whether the residual does more damage than"
            elif low > 1:
                words = "the residual does more damage than"
            elif high < 1:
                words = "the residual does less damage than"
            else:
                words = "the residual cannot be told from"
            clauses.setdefault(f"{words} {control} of the same norm", []).append(
                f"{HOW[mode]} ({number}, {row['layer_group']})"
            )
        parts += _clauses(model, clauses)
    return _joined(parts, findings, "whether the residual's direction matters cannot be said")


def synthesis_sentence(findings: Findings) -> str:
    """Whether the correlation holds across models.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    str
    """
    if findings.synthesis is None:
        return f"Whether this holds across models cannot be said: {findings.synthesis_reason}."
    table, fits = findings.synthesis.tidy(), findings.synthesis.glance()
    label = findings.models[0].main_class
    if label not in set(table["function_class"]):
        label = table["function_class"].iloc[0]
    parts = []
    for mode, row in _modes(table.assign(layer_group="late"), label):
        fit = fits[(fits["positions"] == mode) & (fits["function_class"] == label)].iloc[0]
        low, high = row["conf_low"], row["conf_high"]
        if not np.isfinite(row["estimate"]):
            parts.append(f"{HOW[mode]}, there is no average: {row['reason']}")
            continue
        if low > 0:
            words = "larger residuals do more damage on average over models"
        elif high < 0:
            words = "larger residuals do less damage on average over models"
        else:
            words = "an average over models cannot be told from none"
        parts.append(
            f"{HOW[mode]}, {words} ({label}: {_number(row['estimate'], low, high)} over "
            f"{int(row['k'])} models; {fit['i2']:.0f} % of the variation is between models; the "
            f"next model is expected within [{row['pred_low']:.2f}, {row['pred_high']:.2f}])"
        )
    few = int(table["k"].min())
    if few < 5:
        parts.append(f"{few} models are too few to say much of other models")
    return _capital("; ".join(parts)) + "."


def _clauses(model: ModelFindings, clauses: dict[str, list[str]]) -> list[str]:
    """A clause for every answer, with the ways of patching that gave it."""
    return [
        f"in {model.key} ({model.main_class}) {words}, {' and '.join(modes)}"
        for words, modes in clauses.items()
    ]


def _modes(table: pd.DataFrame, label: str | None) -> list[tuple[str, Any]]:
    """A class's row of the layers after the first, by way of patching."""
    rows = []
    for mode in ("single", "all"):
        row = _late(table[table["positions"] == mode], label)
        if row is not None:
            rows.append((mode, row))
    return rows


def _late(table: pd.DataFrame | None, label: str | None) -> Any:
    """The row of a class in the layers after the first; of the first where there is no other."""
    if table is None or label is None:
        return None
    rows = table[table["function_class"] == label]
    late = rows[rows["layer_group"] != "layer 1"]
    rows = late if len(late) else rows
    return rows.iloc[0] if len(rows) else None


def _joined(parts: Sequence[str], findings: Findings, otherwise: str) -> str:
    if not parts:
        return f"{_capital(otherwise)}: the study lacks what it is measured from."
    documents = [
        len(np.unique(leaf["document"].values))
        for model in findings.models
        for name in ("geometry", "perturbation")
        if (leaf := model.leaves.get(name)) is not None and "document" in leaf.coords
    ]
    if not documents:
        return _capital("; ".join(parts)) + "."
    least, most = min(documents), max(documents)
    several = f"{least}" if least == most else f"{least} to {most}"
    if most < 2:
        return f"{_capital('; '.join(parts))}; with one document there are no intervals."
    return f"{_capital('; '.join(parts))}; {findings.level:.0%} intervals over {several} documents."


def _reason(rows: pd.DataFrame) -> str:
    given = [r for r in rows["reason"] if r]
    return given[0] if given else "no interval"


def _share(estimate: float, low: float, high: float) -> str:
    if not np.isfinite(estimate):
        return "an unknown share"
    text = f"{100 * estimate:.0f} %"
    return f"{text} [{100 * low:.0f}, {100 * high:.0f}]" if np.isfinite([low, high]).all() else text


def _number(estimate: float, low: float, high: float) -> str:
    interval = f" [{low:.2f}, {high:.2f}]" if np.isfinite([low, high]).all() else ""
    return f"{estimate:.2f}{interval}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
