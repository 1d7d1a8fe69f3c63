"""How much of a layer's update is tokenwise, by layer, function class and model, beside its nulls?

raw cos(D, t)   centred cos(D - mean, t - mean)   r2_centred = 1 - sum |r|^2 / sum |D - mean|^2
forced: sqrt(1 - e^2), e = |r| / |D|        state cosine cos(h_l, T(h_{l-1})), also of T = identity
"""

# %% Models, text and decompositions: maps from reference documents, all else on other documents
import common
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots
from geomstats_lm.geometry import beside_forced

given = common.options(__doc__, draws=8)
nodes = {name: common.node(name, given) for name in given.models}
geometries = {name: node["geometry"].to_dataset() for name, node in nodes.items()}

# %% Means over tokens, with intervals from whole documents drawn anew. Raw and centred cosines
# stand beside what the size of the residual forces, over the same tokens (those with e < 1)
MEASURES = [
    "r2_centred", "relative_error", "cos_update_tokenwise", "forced_cos_update_tokenwise",
    "cos_centred", "forced_cos_centred", "cos_next_state_tokenwise", "cos_next_state_state",
]  # fmt: skip
means = pd.concat(
    [
        gl.layer_means(beside_forced(data), MEASURES, n_boot=given.n_boot).tidy()
        for data in geometries.values()
    ],
    ignore_index=True,
)

# %% The table: a row per model, layer and class
wide = means.pivot_table(
    index=["model", "layer", "function_class"], columns="measure", sort=False,
    values=["estimate", "conf_low", "conf_high"],
)  # fmt: skip


def beside(measure: str, forced: str) -> list[str]:
    """A mean and, in brackets, what is forced or trivial."""
    pairs = zip(wide["estimate"][measure], wide["estimate"][forced])
    return ["–" if pd.isna(a) else f"{a:.2f} ({b:.2f})" for a, b in pairs]


shown = wide.index.to_frame(index=False)
shown["explained, centred [95 %]"] = [
    f"{v:.2f} [{low:.2f}, {high:.2f}]"
    for v, low, high in zip(*(wide[c]["r2_centred"] for c in ("estimate", "conf_low", "conf_high")))
]
shown["error"] = wide["estimate"]["relative_error"].map("{:.2f}".format).to_list()
shown["cos raw (forced)"] = beside("cos_update_tokenwise", "forced_cos_update_tokenwise")
shown["cos centred (forced)"] = beside("cos_centred", "forced_cos_centred")
shown["state cosine (identity)"] = beside("cos_next_state_tokenwise", "cos_next_state_state")
common.keep(
    means, "alignment", given, shown=shown,
    notes=[
        "explained, centred: r2_centred = 1 - sum |r|^2 / sum |D - mean D|^2; error: mean of "
        "|r| / |D|. Forced: sqrt(1 - error^2), by the size of the residual alone; cosines and "
        "forced ones are means over tokens with an error below 1.",
        "State cosine: of h_l and T(h_{l-1}); in brackets that of T = identity.",
        "self_only: the block itself run on the token alone, so its residual is what context does; "
        "a fitted map that explains more guesses context from the token.",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Beside nulls: the size of the residual alone (forced), a random direction of it (isotropic),
# another token's direction (exchanged), for the local affine map
FIT = ["affine"]
tables = []
for name, node in nodes.items():
    parts = node["decomposition"].to_dataset().sel(function_class=FIT)
    space = node["subspace"].to_dataset().sel(function_class=FIT)
    drawn = [
        null(parts, draws=given.draws, subspace=space).compute()
        for null in (gl.isotropic, gl.exchanged)
    ]
    own = geometries[name].sel(function_class=FIT)
    tables.append(gl.geometry_summary(own, drawn, n_boot=given.n_boot).tidy())
nulls = pd.concat(tables, ignore_index=True)
columns = [
    "model", "layer", "measure", "null", "observed", "null_mean", "null_low", "null_high",
    "estimate", "conf_low", "conf_high", "verdict",
]  # fmt: skip
common.keep(
    nulls, "nulls", given, shown=nulls[columns],
    notes=[
        "Local affine map. estimate: observed - null, with its interval; null_low, null_high: "
        "where a layer's mean lies if the null holds. Angles in degrees. Beside forced cosines "
        "stand the tokens with an error below 1, beside drawn ones all.",
        f"isotropic and exchanged: {given.draws} draws a token, but for the energy, whose "
        f"isotropic null is m/d with m = {common.COMPONENTS}. Verdicts name their null.",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Figures
explained = means[means["measure"] == "r2_centred"].rename(columns={"estimate": "r2_centred"})
explained = explained[~explained["function_class"].isin(["identity", "self_only"])]
heatmap = plots.plot_alignment_heatmap(explained.drop(columns="measure"))
common.keep_figure(heatmap, "explained", given)
MAPS = {
    "cos_update_tokenwise": "raw", "forced_cos_update_tokenwise": "raw, forced",
    "cos_centred": "centred", "forced_cos_centred": "centred, forced",
}  # fmt: skip
cosines = means[(means["function_class"] == "affine") & means["measure"].isin(MAPS)]
cosines = cosines.assign(cosine=cosines["measure"].map(MAPS)).drop(columns="measure")
common.keep_figure(
    plots.plot_layer_profile(
        cosines, "estimate", by="cosine", label="cosine of update and\ntokenwise part"
    ),
    "raw_and_centred", given,
)  # fmt: skip
