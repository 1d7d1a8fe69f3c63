"""What do published claims about layer updates look like beside what the method forces by itself?

claim: the paper's figure | ours on the definition that gives it | ours held-out and centred
forced: sqrt(1 - e^2), 0, 90 degrees, m/d;  null with its interval;  a verdict that names its null
"""

# %% Held-out decompositions of all models: one function class, k nearest reference tokens
import common
import evidence
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots

given = common.options(__doc__, function_class="affine")
nodes = {name: common.node(name, given, perturbed=True) for name in given.models}

# %% The definitions that give the claims: cosine of states and not of updates, a token among its
# own neighbours, raw cosines where one direction dominates, the subspace of the very tokens
# measured, tokens of all layers together. Ours: held-out documents, centred, within layers, beside
# what the residual's size forces and a null; one position patched at a time and all at once
table = evidence.table_of(nodes, given.function_class, given.n_boot)

# %% One table
NOTES = [
    f"Function class {given.function_class}. Means over tokens within a layer, then over the "
    "layers of a group; correlations within layers, by Fisher z; brackets: 95 % intervals.",
    "Forced: what follows from the residual's size at a right angle; null: the mean over random "
    "directions of the residual and where a group's mean lies if it has one; size alone: the "
    "same |r| against the KL of another token's residual of that norm. Observed - null is about "
    "the null that the verdict names, raw cosines over tokens with an error below 1.",
    "Self-included neighbours: the token is among the k tokens its map is fitted on.",
]
notes = [*evidence.counted(table), *NOTES, *common.facts(nodes)]
common.keep(table, "what_is_forced", given, notes, shown=evidence.side_by_side(table))

# %% Figures: observed, with its interval, on the null's grey band, by layer
own = [
    n["geometry"].to_dataset().sel(function_class=[given.function_class]) for n in nodes.values()
]
measures = [*evidence.JUDGED.values()]
layered = pd.concat(
    [gl.geometry_summary(g, measures=measures, n_boot=given.n_boot).tidy() for g in own]
)
for end in ("low", "high"):  # the interval of observed - null, about the null
    layered[f"observed_{end}"] = layered["null_mean"] + layered[f"conf_{end}"]
LABELS = [
    "cos(update, tokenwise)", "cos(residual, tokenwise)",
    "angle of residual and\ntokenwise part, degrees",
    "residual's energy in the\ndominant tokenwise subspace",
]  # fmt: skip
for measure, label in zip(measures, LABELS):
    part = layered[layered["measure"] == measure].drop(columns=["measure", "null"])
    common.keep_figure(plots.plot_layer_profile(part, "observed", label=label), measure, given)
