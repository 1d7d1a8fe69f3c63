"""Does the size of what a tokenwise map misses go with the damage of leaving it out?

rho_s(|r|, KL) over tokens within a layer, one position patched at a time and all at once;
KL against the dose h_l - a r_l;   damage ratio KL(r) / KL(r'), |r'| = |r|, of three controls
"""

# %% Replace h_l by T(h_{l-1}) in the running model; nothing else is changed
import common
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots
from geomstats_lm.cube import open_node
from geomstats_lm.figure_style import MODES
from geomstats_lm.report import correlate

given = common.options(__doc__, doses=(0.25, 0.5, 1.0))
nodes = {name: common.node(name, given, perturbed=True) for name in given.models}
leaves = {
    name: (node["geometry"].to_dataset(), node["perturbation"].to_dataset())
    for name, node in nodes.items()
}

# %% Spearman over tokens within each layer, both ways of patching side by side; beside it that of
# the same residual sizes with the damage of another token's residual: what size alone gives
correlations, controlled = [], []
for geometry, perturbation in leaves.values():
    how = {"n_boot": given.n_boot, "adjust": "fdr_bh"}
    correlations.append(correlate(geometry, perturbation, "kl ~ residual_norm", **how).tidy())
    size_alone = perturbation.assign(
        kl=perturbation.kl_control.sel(control="exchanged", drop=True).mean("draw")
    )
    controlled.append(correlate(geometry, size_alone, "kl ~ residual_norm", **how).tidy())
found = pd.concat(correlations, ignore_index=True)
keys = ["model", "function_class", "positions", "layer"]
alone = pd.concat(controlled, ignore_index=True)[[*keys, "estimate", "conf_low", "conf_high"]]
alone = alone.rename(columns={c: f"{c}_exchanged" for c in alone if c not in keys})
found = found.merge(alone, on=keys)


def interval(frame: pd.DataFrame, suffix: str = "") -> list[str]:
    """Estimate and interval as text."""
    columns = [frame[f"{c}{suffix}"] for c in ("estimate", "conf_low", "conf_high")]
    return [f"{v:.2f} [{low:.2f}, {high:.2f}]" for v, low, high in zip(*columns)]


text = found.assign(
    real=interval(found), exchanged=interval(found, "_exchanged")
).pivot(index=["model", "function_class", "layer"], columns="positions",
        values=["real", "exchanged", "n"])  # fmt: skip
shown = text.index.to_frame(index=False)
for mode, title in (("single", "single"), ("all", "all at once")):
    shown[f"Spearman, {title}"] = text["real"][mode].to_list()
    shown[f"size alone, {title}"] = text["exchanged"][mode].to_list()
    shown[f"n, {title}"] = text["n"][mode].to_list()
common.keep(
    found, "correlations", given, shown=shown,
    notes=[
        "Spearman correlation over tokens of |r| and the KL divergence (nats) of the output. "
        "single: one position patched, four a window, output read there; all at once: every usable "
        "position.",
        "size alone: the same |r| against the KL of another token's residual of that norm.",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Damage beside that of each control of the same norm
ratios = pd.concat(
    [gl.damage_ratio(p, n_boot=given.n_boot).tidy() for _, p in leaves.values()],
    ignore_index=True,
)
columns = [
    "model", "function_class", "positions", "control", "layer", "estimate", "conf_low",
    "conf_high", "damage", "damage_control", "participation_ratio", "n", "n_clusters",
]  # fmt: skip
common.keep(
    ratios, "damage_ratio", given, shown=ratios[columns],
    notes=[
        "estimate: mean KL of the residual over mean KL of the control; 1: only size matters. "
        "exchanged: another token's residual; gaussian: noise with the residuals' covariance; "
        "isotropic: no fair control where residuals vary in few directions (participation_ratio).",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Dose-response: a share of the residual is taken off, in the first, a middle and the last layer
doses = []
for name, node in nodes.items():
    depth = int(node["activations"].attrs["n_layers"])
    dose = gl.perturb(
        common.load(name), open_node(given.store, name), function_class="affine",
        layers=sorted({1, (depth + 1) // 2, depth}), factors=given.doses, positions=["all"],
        measures=["kl"], store=given.store, leaf="dose", progress=False,
    )  # fmt: skip
    doses.append(gl.damage_ratio(dose, n_boot=given.n_boot).tidy())
dose = pd.concat(doses, ignore_index=True)
common.keep(
    dose, "dose_response", given,
    shown=dose[["model", "layer", "factor", "damage", "damage_control", "estimate", "conf_low",
                "conf_high", "n"]],
    notes=[
        "Affine map, all positions at once. factor: share of the residual taken off; damage: mean "
        "KL (nats), that of another token's residual of the same size, and their ratio. KL of a "
        "small change grows with the square of the dose.",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Figures
part = found[found["function_class"] == "affine"].drop(columns="function_class")
figure = plots.plot_layer_profile(
    part.assign(mode=part["positions"].map(MODES)).drop(columns="positions"), "estimate",
    by="mode", label="Spearman of |residual| and KL",
)  # fmt: skip
common.keep_figure(figure, "correlations", given)
single = ratios[(ratios["function_class"] == "affine") & (ratios["positions"] == "single")]
figure = plots.plot_layer_profile(
    single.drop(columns=["function_class", "positions"]), "estimate", by="control",
    label="KL of residual / KL of control",
)  # fmt: skip
common.keep_figure(figure, "damage_ratio", given)
common.keep_figure(plots.plot_dose_response(dose.drop(columns="function_class")), "dose", given)
first = given.models[0]
scatter = plots.plot_error_damage(
    nodes[first], "residual_norm", "kl", layer=3, function_class="affine", control="exchanged",
    correlation=found,
)  # fmt: skip
common.keep_figure(scatter, f"tokens_{first}_layer_3", given)
