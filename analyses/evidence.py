"""Which numbers bear on each published claim about layer updates?

A row per model, layer group and number, with its interval over documents.  Its role is what it is
in the comparison: published (the definition that gives the claim), trivial (what that definition
gives by itself), honest (held-out), forced, null, or difference (observed - null, with a verdict).
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import xarray as xr
from common import COMPONENTS

import geomstats_lm as gl
from geomstats_lm import subspaces
from geomstats_lm.geometry import beside_forced
from geomstats_lm.geometry_measures import norm
from geomstats_lm.report import correlate, layer_groups

ALIGNED = "the update is almost perfectly aligned with the tokenwise part"
WEAK = "the residual is weakly aligned with the tokenwise part"
ANGLE = "the residual is at a large angle to the tokenwise part"
PROJECTION = "the residual projects little onto the dominant tokenwise subspace"
DAMAGE = "size of residual and damage of the output go together (Spearman)"
PAPER = {DAMAGE: "often over 0.7, up to 0.95"}  # the others are stated without a figure
PAPERS = "linear"  # the paper's maps have no intercept
JUDGED = {
    ALIGNED: "cos_update_tokenwise", WEAK: "cos_residual_tokenwise",
    ANGLE: "angle_residual_tokenwise", PROJECTION: "energy_residual",
}  # fmt: skip
COLUMNS = [
    "claim", "paper", "model", "layers", "role", "quantity", "estimate", "conf_low", "conf_high",
    "observed", "forced", "null_mean", "null_low", "null_high", "verdict", "n", "n_clusters",
]  # fmt: skip


def table_of(nodes: dict[str, xr.DataTree], function_class: str, n_boot: int) -> pd.DataFrame:
    """All evidence, claim by claim."""
    table = pd.concat(
        [
            frame.rename(columns={"layer_group": "layers"}).assign(
                claim=claim, paper=PAPER.get(claim, "not stated"), role=role, quantity=quantity
            )
            for node in nodes.values()
            for claim, role, quantity, frame in evidence(node, function_class, n_boot)
        ],
        ignore_index=True,
    )[COLUMNS]
    order = table["claim"].map([*JUDGED, DAMAGE].index)
    return table.iloc[order.argsort(kind="stable")].reset_index(drop=True)


# The subspace that gives low projections: of the very tokens that are measured, with their mean
def energy_in_sample(parts: xr.Dataset, of: str) -> xr.DataArray:
    """Energy of a part in the top directions of the same tokens' tokenwise parts."""

    def one_layer(tokenwise, vectors, usable):
        space = subspaces.streamed_subspace(lambda: [tokenwise[usable]], COMPONENTS)
        return norm(vectors @ space.basis.T) ** 2 / norm(vectors) ** 2

    arrays = [parts[name].compute().astype(float) for name in ("tokenwise", of)]
    return xr.apply_ufunc(
        one_layer, *arrays, parts.usable.compute(), vectorize=True,
        input_core_dims=[["token", "dim"]] * 2 + [["token"]], output_core_dims=[["token"]],
    )  # fmt: skip


# All evidence of one model: claim, role of the number, what it is, and a row per layer group
def evidence(
    node: xr.DataTree, function_class: str, n_boot: int
) -> list[tuple[str, str, str, pd.DataFrame]]:
    """Every number with its interval over documents."""
    fit = [function_class]
    geometry = node["geometry"].to_dataset().sel(function_class=fit)
    parts = node["decomposition"].to_dataset().sel(function_class=fit)
    perturbation = node["perturbation"].to_dataset().sel(function_class=fit)
    groups = layer_groups(geometry.layer.values)
    both = list(dict.fromkeys([*fit, PAPERS]))
    own, own_and_papers = (
        xr.DataTree.from_dict({
            "activations": node["activations"].to_dataset(),
            "decomposition": node["decomposition"].to_dataset().sel(function_class=classes),
        })
        for classes in (fit, both)
    )  # fmt: skip
    included, moved = (
        null.isel(null=0, draw=0).compute() for null in (gl.leak(own_and_papers), gl.permuted(own))
    )
    papers = included.sel(function_class=[PAPERS])
    included = included.sel(function_class=fit)

    def means(data: xr.Dataset, measure: str) -> pd.DataFrame:
        return gl.layer_means(data, [measure], groups=groups, n_boot=n_boot).tidy()

    held_out, included = beside_forced(geometry), beside_forced(included)
    raw, forced = "cos_update_tokenwise", "forced_cos_update_tokenwise"
    found = [
        (ALIGNED, "published", "state cosine", means(geometry, "cos_next_state_tokenwise")),
        (
            ALIGNED,
            "trivial",
            "state cosine of T = identity",
            means(geometry, "cos_next_state_state"),
        ),
        (ALIGNED, "published", "self-included neighbours", means(included, raw)),
        (ALIGNED, "trivial", "forced, self-included", means(included, forced)),
        (ALIGNED, "published", "self-included, T(x) = A x", means(papers, raw)),
        (ALIGNED, "published", "raw cosine", means(held_out, raw)),
        (
            ALIGNED,
            "trivial",
            "raw cosine of maps fitted to other tokens' updates",
            means(moved, raw),
        ),
        (ALIGNED, "honest", "centred cosine", means(held_out, "cos_centred")),
        (ALIGNED, "forced", "centred cosine", means(held_out, "forced_cos_centred")),
        (ALIGNED, "honest", "centred update explained", means(geometry, "r2_centred")),
        (WEAK, "published", "self-included neighbours", means(included, JUDGED[WEAK])),
        (WEAK, "honest", "cosine, held-out", means(geometry, JUDGED[WEAK])),
        (ANGLE, "published", "self-included neighbours", means(included, JUDGED[ANGLE])),
        (ANGLE, "honest", "degrees, held-out", means(geometry, JUDGED[ANGLE])),
    ]
    inside = parts.assign(usable=geometry.usable)
    for of, role in (("residual", "published"), ("update", "trivial")):
        within = geometry.assign(energy=energy_in_sample(inside, of))
        found += [
            (PROJECTION, role, f"{of}, subspace of the same tokens", means(within, "energy")),
            (PROJECTION, "honest", f"{of}, held-out and centred", means(geometry, f"energy_{of}")),
        ]
    wanted = list(JUDGED.values())
    judged = gl.geometry_summary(geometry, measures=wanted, groups=groups, n_boot=n_boot).tidy()
    for claim, measure in JUDGED.items():
        found.append((claim, "difference", measure, judged[judged["measure"] == measure]))
    return found + damage(geometry, perturbation, groups, n_boot)


# Correlations: one position at a time and all at once; what the size alone gives, from another
# token's residual of the same norm; and two other claims under the same name, over all layers
def damage(
    geometry: xr.Dataset, perturbation: xr.Dataset, groups: dict, n_boot: int
) -> list[tuple]:
    """Evidence on the last claim."""
    controlled = perturbation.assign(
        kl=perturbation.kl_control.sel(control="exchanged", drop=True).mean("draw")
    )
    real, size = (
        correlate(geometry, p, n_boot=n_boot).pool("layer", groups)
        for p in (perturbation, controlled)
    )
    less = gl.compare_correlations(real, size).tidy()
    ratio = gl.damage_ratio(perturbation.sel(control=["exchanged"]), groups=groups,
                            n_boot=n_boot).tidy()  # fmt: skip
    less["verdict"] = [
        f"distinct from exchanged: {'above' if low > 0 else 'below'}" if low > 0 or high < 0
        else "not distinct from exchanged"
        for low, high in zip(less["conf_low"], less["conf_high"])
    ]  # fmt: skip
    found = []
    for mode, name in (("single", "single positions"), ("all", "all positions at once")):
        one, alone, change, times = (t[t["positions"] == mode] for t in (
            real.tidy(), size.tidy(), less, ratio))  # fmt: skip
        found += [
            (DAMAGE, "published", name, one),
            (DAMAGE, "null", f"{name}, size alone", alone),
            (DAMAGE, "difference" if mode == "single" else "honest", f"{name}, less size", change),
            (DAMAGE, "honest", f"damage ratio, {name}", times),
        ]
        by = ["model", "function_class", "positions"]
        of = perturbation.sel(positions=[mode])
        for label, how in (
            ("tokens of all layers", {"by": by}),
            ("layer means", {"unit": "layer"}),
        ):
            over = correlate(geometry, of, n_boot=n_boot, **how).tidy()
            found.append((DAMAGE, "published", f"{label}, {name}", over.assign(layer_group="all")))
    return found


def side_by_side(evidence: pd.DataFrame) -> pd.DataFrame:
    """Evidence on claims, a row per number, as a table with a row per claim, model and layers.

    What a definition gives by itself (role trivial) follows the number that it belongs to.
    """
    rows = []
    for key, part in evidence.groupby(["claim", "paper", "model", "layers"], sort=False):
        by_role: dict[str, list[str]] = {}
        for one in part.to_dict("records"):
            value = interval(one, "estimate", "conf_low", "conf_high")
            if one["role"] == "trivial":
                by_role["published"][-1] += f" ({one['quantity']}: {value})"
            else:
                by_role.setdefault(one["role"], []).append(f"{one['quantity']} {value}")
        judged = part[part["role"] == "difference"].to_dict("records")
        null = [interval(one, "null_mean", "null_low", "null_high") for one in judged]
        null = [text for text in null if text != "–"] + by_role.get("null", [])
        forced = [f"{one['forced']:.2f}" for one in judged if pd.notna(one["forced"])]
        rows.append(
            {
                **dict(zip(("claim", "the paper", "model", "layers"), key)),
                "ours, on the definition that gives it": "; ".join(by_role.get("published", [])),
                "ours, held-out": "; ".join(by_role.get("honest", [])) or "–",
                "forced": "; ".join([*forced, *by_role.get("forced", [])]) or "–",
                "null": "; ".join(null) or "–",
                "observed - null": "; ".join(by_role.get("difference", [])) or "–",
                "verdict": "; ".join(str(one["verdict"]) for one in judged) or "–",
            }
        )
    return pd.DataFrame(rows)


def counted(evidence: pd.DataFrame) -> list[str]:
    """How often each verdict was given on each claim, in a sentence a claim."""
    judged = evidence[evidence["role"] == "difference"]
    lines = []
    for claim, part in judged.groupby("claim", sort=False):
        counts = part["verdict"].value_counts()
        told = ", ".join(f"{verdict} in {n}" for verdict, n in counts.items())
        lines.append(
            f"{claim}: of {len(part)} layer groups of {part['model'].nunique()} models, {told}."
        )
    return lines


def interval(row: dict[Any, Any], value: str, low: str, high: str) -> str:
    """A number with its interval, as text."""
    if pd.isna(row[value]):
        return "–"
    middle, *ends = (f"{round(row[name], 2) + 0.0:.2f}" for name in (value, low, high))
    return middle if pd.isna(row[low]) else f"{middle} [{', '.join(ends)}]"
