"""What did a study find?  One row per model, layer group and function class.

Means over usable evaluation tokens within a layer, then over the layers of a group; correlations
pooled as ``tanh(mean of arctanh(rho_l))``; ``damage_ratio = sum KL / sum KL_control``.  Layer 1,
the step from the embedding, is always a group of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.cube import settings_of
from geomstats_lm.damage import damage_ratio
from geomstats_lm.geometry import beside_forced
from geomstats_lm.statistics import RankCorrelation

CONTROL_NAMES = {
    "exchanged": "another token's residual",
    "gaussian": "Gaussian noise with the residuals' covariance",
    "isotropic": "isotropic noise",
}
WIDE = 180  # characters that the whole table takes
MEANS = (
    "relative_error", "cos_update_tokenwise", "forced_cos_update_tokenwise", "cos_centred",
    "forced_cos_centred", "angle_residual_tokenwise", "cos_next_state_tokenwise",
    "cos_next_state_state",
)  # fmt: skip


def layer_groups(layers: np.ndarray) -> dict[str, list[int]]:
    """Groups of layers for tables: the first by itself, the others in thirds.

    Parameters
    ----------
    layers : array of int
        Layers 1..L.

    Returns
    -------
    dict of str to list of int

    Examples
    --------
    >>> layer_groups([1, 2, 3, 4, 5, 6])
    {'1 (embedding)': [1], '2-3 (early)': [2, 3], '4-5 (middle)': [4, 5], '6 (late)': [6]}
    """
    numbers = sorted(int(v) for v in layers)
    groups = {"1 (embedding)": [1]} if 1 in numbers else {}
    rest = [v for v in numbers if v != 1]
    for name, part in zip(("early", "middle", "late"), np.array_split(rest, 3)):
        if len(part):
            span = f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}"
            groups[f"{span} ({name})"] = [int(v) for v in part]
    return groups


def main_table(
    geometry: xr.Dataset,
    perturbation: xr.Dataset | None = None,
    correlation: RankCorrelation | None = None,
) -> pd.DataFrame:
    """The main table of one model.

    Parameters
    ----------
    geometry, perturbation : xarray.Dataset
        Leaves of one model; without the second the table has no damage.
    correlation : RankCorrelation
        Over layers, from :func:`geomstats_lm.merging.correlate`; comes with a perturbation.

    Returns
    -------
    pandas.DataFrame
        One row per layer group and function class, unrounded; ``spearman_*`` and
        ``damage_ratio_*`` for each way of patching, with ``*_low`` and ``*_high``.
    """
    groups = layer_groups(geometry.layer.values)
    made = settings_of(geometry).get("decomposition", {})
    columns = [
        *MEANS, "r2_centred", "explained", "n", "n_massive", "n_error_above_one", "n_reference",
    ]  # fmt: skip
    layered = beside_forced(geometry[[c for c in columns if c in geometry]])
    layered = layered.map(lambda v: v.mean("token") if "token" in v.dims else v).compute()
    damage = _damage_rows(groups, perturbation, correlation)
    rows = []
    for group, members in groups.items():
        inside = layered.sel(layer=members).mean("layer")
        for label in geometry.function_class.values:
            one = inside.sel(function_class=label)
            row: dict[str, Any] = {
                "model": str(geometry.model.values[0]),
                "architecture": geometry.attrs.get("architecture", ""),
                "untrained": bool(geometry.attrs.get("untrained", 0)),
                "dequantized": bool(geometry.attrs.get("dequantized", 0)),
                "layer_group": group,
                "function_class": str(label),
                "k": made.get("k", geometry.attrs.get("k")),
                "control": "" if perturbation is None else first_control(perturbation),
                **{str(name): float(one[name].values.item()) for name in layered},
            }
            if perturbation is None or correlation is None:
                row["n_clusters"] = n_documents(geometry)
            else:
                row |= damage.get((str(label), group), {})
            rows.append(row)
    return pd.DataFrame(rows)


def _damage_rows(
    groups: dict[str, list[int]],
    perturbation: xr.Dataset | None,
    correlation: RankCorrelation | None,
) -> dict[tuple[str, str], dict[str, Any]]:
    """What a row of the main table says of damage, by function class and layer group."""
    if perturbation is None or correlation is None:
        return {}
    method, level = correlation.settings["method"], correlation.settings["level"]
    n_boot, seed = correlation.settings["n_boot"], correlation.settings["seed"]
    present = {v: g for v, g in _patched_groups(groups, perturbation).items() if g}
    pooled = correlation.pool(over="layer", groups=present).tidy()
    pooled_rows = pooled.set_index(["function_class", "positions", "layer_group"]).to_dict("index")
    ratios = _damage_ratios(perturbation, present, n_boot=n_boot, seed=seed, level=level)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for label, group in itertools.product(perturbation.function_class.values, groups):
        row = rows.setdefault((str(label), group), {})
        for mode in perturbation.positions.values:
            key = (label, mode, group)
            found: Any = pooled_rows.get(key, {})
            name = f"{method}_{mode}"
            row[name] = found.get("estimate", np.nan)
            row[f"{name}_low"] = found.get("conf_low", np.nan)
            row[f"{name}_high"] = found.get("conf_high", np.nan)
            row[f"{name}_reason"] = found.get("reason", "")
            row["n_clusters"] = found.get("n_clusters", row.get("n_clusters", np.nan))
            for part, value in ratios.get(key, {}).items():
                row[f"damage_ratio_{mode}{part}"] = value
    return rows


def n_documents(data: xr.Dataset) -> int:
    """Documents that the tokens come from: what intervals resample."""
    return len(np.unique(data["document"].values)) if "document" in data.coords else 0


def _patched_groups(groups: dict[str, list[int]], perturbation: xr.Dataset) -> dict[str, list[int]]:
    there = set(perturbation.layer.values.tolist())
    return {name: [v for v in members if v in there] for name, members in groups.items()}


def first_control(perturbation: xr.Dataset) -> str:
    """The control of the table: another token's residual where it is among them."""
    names = perturbation.control.values.tolist()
    return "exchanged" if "exchanged" in names else str(names[0])


def _damage_ratios(
    perturbation: xr.Dataset, groups: dict[str, list[int]], **options: Any
) -> dict[tuple[str, str, str], dict[str, float]]:
    """Ratio to the first control by class, way of patching and group: value, low and high."""
    first = perturbation.sel(control=[first_control(perturbation)])
    found = damage_ratio(first, groups=groups, **options).tidy()
    return {
        (row["function_class"], row["positions"], row["layer_group"]): {
            "": row["estimate"], "_low": row["conf_low"], "_high": row["conf_high"],
        }
        for row in found.to_dict("records")
    }  # fmt: skip


def display_table(table: pd.DataFrame) -> pd.DataFrame:
    """The main table rounded for reading, an estimate and its interval or forced value a cell."""
    known = [c for c in ("spearman", "kendall", "pearson", "biweight") if f"{c}_single" in table
             or f"{c}_all" in table]  # fmt: skip
    method = known[0] if known else "spearman"
    shown = pd.DataFrame({"model": table["model"], "layers": table["layer_group"]})
    shown["function class"] = table["function_class"]
    if "n_reference" in table:
        shown["N"] = [f"{n:,.0f}" for n in table["n_reference"]]
    shown["error"] = [_number(v) for v in table["relative_error"]]
    shown["cos (forced)"] = [
        _beside(a, b)
        for a, b in zip(table["cos_update_tokenwise"], table["forced_cos_update_tokenwise"])
    ]
    shown["centred (forced)"] = [
        _beside(a, b) for a, b in zip(table["cos_centred"], table["forced_cos_centred"])
    ]
    for mode in ("single", "all"):
        for name, title in ((f"{method}_{mode}", method), (f"damage_ratio_{mode}", "ratio")):
            if name in table:
                shown[f"{title} {mode}"] = [
                    f"{_number(v)} [{_number(low)}, {_number(high)}]" if np.isfinite(v) else "–"
                    for v, low, high in zip(
                        table[name], table[f"{name}_low"], table[f"{name}_high"]
                    )
                ]
    return shown


def table_notes(table: pd.DataFrame) -> list[str]:
    """Sentences that a reader of the main table needs."""
    tokens = ", ".join(
        f"{model}: {part['n'].iloc[0]:,.0f} evaluation tokens a layer in "
        f"{part['n_clusters'].max():.0f} documents, {part['n_massive'].mean():.1f} massive left out"
        for model, part in table.groupby("model", sort=False)
    )
    share = (table["n_error_above_one"] / table["n"])[table["function_class"] != "identity"]
    above, most = (share.mean(), share.max()) if len(share) else (0.0, 0.0)
    few = table["n_clusters"].min()
    k = table["k"].iloc[0]
    neighbours = "" if pd.isna(k) else f"k = {k}; "
    notes = [
        f"{neighbours}N reference tokens; {tokens}. First and special tokens of "
        "every window are left out.",
        "error: |r| / |D|. cos: update and its tokenwise part; centred: both less the mean "
        "update. Forced: sqrt(1 - error^2), what the size of the residual gives by itself; both "
        f"are means over tokens with an error below 1 (above: {above:.0%} of tokens over all "
        "rows, at most "
        f"{most:.0%} in one).",
    ]
    control = next((c for c in table["control"] if c), None)
    if control is not None:
        notes.append(
            "Correlations: size of residual and KL of the output over tokens within a layer, with "
            "cluster-bootstrap intervals over documents. ratio: KL over that of "
            f"{CONTROL_NAMES[control]} of the same norm. single: one position patched at a time; "
            "all: the whole window."
        )
    if few < 10:
        notes.append(
            f"Only {few:.0f} documents: the intervals are worth little, however narrow they look."
        )
    untrained = table.loc[table["untrained"], "model"].unique()
    if len(untrained):
        notes.append(f"Untrained (fresh weights): {', '.join(untrained)}.")
    quantized = table.loc[table["dequantized"], "model"].unique()
    if len(quantized):
        notes.append(f"Weights dequantized from a GGUF file: {', '.join(quantized)}.")
    return notes


def table_markdown(table: pd.DataFrame) -> str:
    """The main table and its notes as Markdown."""
    from geomstats_lm.statistics.results import markdown_table

    return "\n\n".join([markdown_table(display_table(table)), *table_notes(table)]) + "\n"


def print_table(table: pd.DataFrame, console: Any = None) -> None:
    """Print the main table, one block a model.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`main_table` or ``table.csv``.
    console : rich.console.Console, optional
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if console is None:
        console = Console()
        if not console.is_terminal:  # a file or a pipe has no width of its own
            console = Console(width=WIDE)
    shown = display_table(table)
    blocks = _blocks_of_columns(shown.iloc[:, 1:], console.width)
    for model, part in shown.groupby("model", sort=False):
        own = table[table["model"] == model].iloc[0]
        untrained = ", untrained" if own["untrained"] else ""
        for columns in blocks:
            grid = Table(title=f"{model} ({own['architecture']}{untrained})", box=box.SIMPLE_HEAD)
            for name in columns:
                text = name in ("layers", "function class")
                grid.add_column(name, justify="left" if text else "right", no_wrap=text)
            before = None
            for row in part[columns].itertuples(index=False):
                if before is not None and row[0] != before:
                    grid.add_section()
                cells = [str(v).replace("[", "\\[") for v in row[1:]]
                grid.add_row("" if row[0] == before else row[0], *cells)
                before = row[0]
            console.print(grid)
    for note in table_notes(table):
        console.print(note, style="dim", markup=False, highlight=False)


def _blocks_of_columns(shown: pd.DataFrame, width: int) -> list[list[str]]:
    """Columns in blocks that fit the width, each led by layers and function class."""
    size = {str(c): max([len(str(c)), *shown[c].map(len)]) + 4 for c in shown}
    lead, rest = list(shown.columns[:2]), list(shown.columns[2:])
    blocks: list[list[str]] = [[*lead]]
    for name in rest:
        if len(blocks[-1]) > 2 and sum(size[c] for c in blocks[-1]) + size[name] > width:
            blocks.append([*lead])
        blocks[-1].append(name)
    return blocks


def _number(value: float) -> str:
    return "–" if not np.isfinite(value) else f"{value:.2f}"


def _beside(value: float, forced: float) -> str:
    return "–" if not np.isfinite(value) else f"{value:.2f} ({_number(forced)})"
