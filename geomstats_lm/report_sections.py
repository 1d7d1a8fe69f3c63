"""Which questions does the report answer, each with its figure, its table and one sentence?

tokenwise share -> distinct or forced -> size and damage -> against a control -> across models
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from geomstats_lm import sentences
from geomstats_lm.figure_style import MODES
from geomstats_lm.findings import Findings, ModelFindings
from geomstats_lm.main_table import display_table, table_notes
from geomstats_lm.merging import merge_leaves
from geomstats_lm.plots import (
    plot_angles,
    plot_dose_response,
    plot_error_damage,
    plot_forest,
    plot_funnel,
    plot_layer_profile,
    plot_subspace_energy,
)
from geomstats_lm.table_files import Table

INTERVAL = {"conf_low": "low", "conf_high": "high"}
WHERE = {"model": "model", "function_class": "function class"}
LOWEST_SHARE = -0.5  # one class that fails badly must not flatten all others


@dataclass
class Section:
    """One question of the report."""

    name: str
    title: str
    sentence: str = ""
    figures: list[tuple[Figure, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def sections(findings: Findings) -> list[Section]:
    """All sections of a report, those too that cannot be made, with the reason.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    list of Section
    """
    return [
        _main(findings),
        _share(findings),
        _distinct(findings),
        _damage(findings),
        _control(findings),
        _synthesis(findings),
    ]


def _main(findings: Findings) -> Section:
    section = Section("main", "What was found")
    table = findings.together("table")
    _each(findings, section, "geometry", "geometry", lambda m: None)
    if table is not None:
        caption = "Main table: one row per model, layer group and function class"
        section.tables.append(Table("main", caption, table, display=display_table(table)))
        section.notes = table_notes(table)
    return section


def _share(findings: Findings) -> Section:
    section = Section("share", "How much of the update is tokenwise?")
    section.sentence = sentences.share_sentence(findings)

    def draw(model: ModelFindings) -> None:
        if model.share is None:
            return
        ax: Any = plot_layer_profile(
            model.share, "estimate", label="share of the centred update\nexplained"
        )
        ax.axhline(0, color="0.6", lw=1, zorder=0)
        lowest = ax.get_ylim()[0]
        ax.set_ylim(bottom=max(lowest, LOWEST_SHARE))
        ax.set_title(model.key, fontsize=9)
        caption = f"{model.key}: share explained by layer, bands are intervals; grey line: a \
constant update."
        if lowest < LOWEST_SHARE:
            caption += f" Values below {LOWEST_SHARE} are not shown."
        section.figures.append((ax.figure, caption))

    _each(findings, section, "geometry", "geometry", draw)
    shown = {**WHERE, "layer": "layer", "estimate": "share explained", **INTERVAL, "n": "tokens",
             "n_clusters": "documents", "reason": "remark"}  # fmt: skip
    _table(section, findings, "share", "share", "Share of the centred update explained", shown)
    return section


def _distinct(findings: Findings) -> Section:
    section = Section("distinct", "Is the residual distinct from what the method forces?")
    section.sentence = sentences.distinct_sentence(findings)

    def draw(model: ModelFindings) -> None:
        geometry: Any = model.leaves["geometry"]
        if "angle_residual_tokenwise" not in geometry:
            return
        ax: Any = plot_angles(geometry, function_class=model.main_class)
        section.figures.append(
            (ax.figure, f"{model.key}, {model.main_class}: angles over tokens, dots are medians; "
             "grey: 90 degrees and where 95 % of random directions lie.")
        )  # fmt: skip
        if "pooled_energy_residual" in geometry:
            energies = geometry.sel(function_class=[model.main_class])
            drawn: Any = plot_subspace_energy(energies)
            section.figures.append(
                (drawn.figure, f"{model.key}: energy in the dominant tokenwise subspace.")
            )
        else:
            section.notes.append(
                f"{model.key}: energies in the dominant tokenwise subspace were not measured; "
                "geometry(node, subspace=m) measures them."
            )

    _each(findings, section, "geometry", "geometry", draw)
    shown = {
        **WHERE, "layer": "layer", "measure": "measure", "null": "null", "observed": "observed",
        "null_mean": "null", "estimate": "difference", **INTERVAL, "verdict": "verdict",
    }  # fmt: skip
    shown["null"] = "against"
    _table(section, findings, "geometry", "geometry", "Observed geometry beside its nulls", shown)
    return section


def _damage(findings: Findings) -> Section:
    section = Section("damage", "Does the size of the residual go with the damage?")
    section.sentence = sentences.correlation_sentence(findings)

    def draw(model: ModelFindings) -> None:
        if model.correlation is None:
            section.missing.append(f"{model.key}: correlations need geometry and perturbation.")
            return
        table = model.correlation.tidy()
        for mode, part in table.groupby("positions", sort=False):
            name = f"{str(part['method'].iloc[0]).capitalize()} of |r| and KL"
            ax: Any = plot_layer_profile(part, "estimate", label=name)
            ax.axhline(0, color="0.6", lw=1, zorder=0)
            ax.set_title(f"{model.key}, {MODES.get(str(mode), mode)}", fontsize=9)
            section.figures.append(
                (ax.figure, f"{model.key}, {MODES.get(str(mode), mode)}: correlation over tokens "
                 "by layer, bands are intervals.")
            )  # fmt: skip
        layers = sorted(set(table["layer"]))
        middle = layers[len(layers) // 2]
        mode = "single" if "single" in set(table["positions"]) else table["positions"].iloc[0]
        one = merge_leaves(model.leaves["geometry"], model.leaves["perturbation"])
        predictor = _predictor(model)
        try:
            scatter: Any = plot_error_damage(
                one, predictor, "kl", layer=middle, function_class=model.main_class,
                positions=mode, correlation=table,
            )  # fmt: skip
        except ValueError:  # nothing was patched there
            return
        scatter.set_title(f"{model.key}, layer {middle}", fontsize=9)
        section.figures.append(
            (scatter.figure, f"{model.key}, {model.main_class}, layer {middle}, "
             f"{MODES.get(str(mode), mode)}: one dot a token.")
        )  # fmt: skip

    _each(findings, section, "perturbation", "perturb", draw)
    shown = {
        **WHERE, "positions": "positions", "layer": "layer", "estimate": "correlation", **INTERVAL,
        "p_adjusted": "p (adjusted)", "n": "tokens", "n_clusters": "documents", "reason": "remark",
    }  # fmt: skip
    caption = "Correlation of the residual's size and the KL of the output"
    _table(section, findings, "correlation", "correlations", caption, shown)
    return section


def _predictor(model: ModelFindings) -> str:
    norm = model.correlation.settings.get("norm", "raw") if model.correlation else "raw"
    names = {"relative": "relative_error", "standardized": "residual_norm_standardized"}
    return names.get(str(norm), "residual_norm")


def _control(findings: Findings) -> Section:
    section = Section("control", "Does it matter more than another residual of its size?")
    section.sentence = sentences.control_sentence(findings)

    def draw(model: ModelFindings) -> None:
        if model.ratio is None:
            section.missing.append(f"{model.key}: the perturbation has no control.")
            return
        for mode, part in model.ratio.groupby("positions", sort=False):
            ax: Any = plot_layer_profile(part, "estimate", label="KL of residual /\nKL of control")
            ax.axhline(1, color="0.6", lw=1, zorder=0)
            ax.set_title(f"{model.key}, {MODES.get(str(mode), mode)}", fontsize=9)
            section.figures.append(
                (ax.figure, f"{model.key}, {MODES.get(str(mode), mode)}: damage ratio by layer, "
                 "bands are intervals; grey line: only size matters.")
            )  # fmt: skip
        if model.doses is not None:
            drawn: Any = plot_dose_response(
                model.doses[model.doses["function_class"] == model.main_class]
            )
            figure = drawn if isinstance(drawn, Figure) else drawn.figure
            section.figures.append((figure, f"{model.key}: damage against dose."))

    _each(findings, section, "perturbation", "perturb", draw)
    shown = {
        **WHERE, "positions": "positions", "control": "control", "layer": "layer",
        "estimate": "ratio", **INTERVAL, "damage": "KL", "damage_control": "KL of control",
        "n": "tokens", "n_clusters": "documents", "reason": "remark",
    }  # fmt: skip
    caption = "Damage of the residual over that of a control of the same norm"
    _table(section, findings, "ratio", "damage_ratios", caption, shown)
    return section


def _synthesis(findings: Findings) -> Section:
    section = Section("synthesis", "Does it hold across models?")
    section.sentence = sentences.synthesis_sentence(findings)
    if findings.synthesis is None:
        return section
    meta = findings.synthesis
    forest: Any = plot_forest(meta)
    section.figures.append(
        (forest.figure, "Correlation of size and damage in the layers after the first: "
         "squares are models, diamonds averages with their intervals, thin lines what the next "
         "model is expected within.")
    )  # fmt: skip
    if meta.tidy()["k"].min() >= 4:  # a funnel of fewer points shows nothing
        drawn: Any = plot_funnel(meta)
        figure = drawn if isinstance(drawn, Figure) else drawn.figure
        section.figures.append((figure, "Funnel: estimates against their standard errors."))
    table = meta.tidy().merge(
        meta.glance()[["positions", "function_class", "tau2", "i2", "q_p_value"]],
        on=["positions", "function_class"],
    )
    shown = {
        "positions": "positions", "function_class": "function class", "estimate": "average",
        **INTERVAL, "pred_low": "next model, low", "pred_high": "next model, high", "k": "models",
        "i2": "I² (%)", "tau2": "tau²", "q_p_value": "p of Q",
    }  # fmt: skip
    caption = "Random-effects synthesis over models of the correlation"
    section.tables.append(Table("synthesis", caption, table, shown))
    section.notes += list(meta.notes)
    return section


def _each(
    findings: Findings,
    section: Section,
    leaf: str,
    command: str,
    draw: Callable[[ModelFindings], None],
) -> None:
    """Draw for every model that has the leaf; say of the others what they lack."""
    for model in findings.models:
        if leaf in model.leaves:
            draw(model)
        else:
            state = "is not finished" if leaf in model.incomplete else "is not in the study"
            section.missing.append(
                f"{model.key}: this cannot be said, since its {leaf} {state}; "
                f"geomstats-lm {command} makes it."
            )


def _table(
    section: Section,
    findings: Findings,
    attribute: str,
    name: str,
    caption: str,
    shown: dict[str, str],
) -> None:
    table: pd.DataFrame | None = findings.together(attribute)
    if table is not None and len(table):
        if "reason" in table and not table["reason"].astype(bool).any():
            shown = {c: h for c, h in shown.items() if c != "reason"}
        section.tables.append(Table(name, caption, table, shown))
