"""Does it hold across architectures: transformers, state-space models and recurrent networks?

y_m ~ N(mu, v_m + tau^2) over models m: REML with Knapp-Hartung intervals, prediction interval;
y ~ depth + mixer over layers, with cluster-robust errors over models
"""

# %% Models, all on the same documents, at the same N and k
import warnings

import common
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots
from geomstats_lm.report import correlate

given = common.options(__doc__)
nodes = {name: common.node(name, given, perturbed=True) for name in given.models}
FIT = "affine"

# %% One estimate per model, way of patching and group of layers: Spearman of residual and damage
# within layers (Fisher z, averaged over a group), and the share of the centred update explained
correlations, shares, by_layer = [], [], []
for name, node in nodes.items():
    geometry = node["geometry"].to_dataset().sel(function_class=[FIT])
    perturbation = node["perturbation"].to_dataset().sel(function_class=[FIT])
    groups, mixer = common.groups(geometry), common.mixer(geometry)
    own = {"model": name, "mixer": mixer}
    result = correlate(geometry, perturbation, n_boot=given.n_boot)
    correlations.append(result.pool("layer", groups).tidy().assign(**own))
    layers = result.tidy()
    layers["depth"] = layers["layer"] / geometry.layer.values.max()
    by_layer.append(layers.assign(**own))
    means = gl.layer_means(geometry, ["r2_centred"], groups=groups, n_boot=given.n_boot).tidy()
    shares.append(means.assign(**own))
correlation = pd.concat(correlations, ignore_index=True)
share = pd.concat(shares, ignore_index=True)
layered = pd.concat(by_layer, ignore_index=True)

# %% Random-effects synthesis
CANNOT = (
    f"{len(nodes)} models, trained on one text at one size: tau^2, prediction intervals and any "
    "difference between kinds of mixers are guesses; nothing here speaks of larger models."
)
columns = [
    "layer_group", "estimate", "conf_low", "conf_high", "pred_low", "pred_high", "tau2", "i2",
    "q_p_value", "k", "reason",
]  # fmt: skip


def synthesis(frame: pd.DataFrame, by: list[str], transform: str | None) -> tuple:
    """The synthesis, and its table with heterogeneity beside each estimate."""
    meta = gl.meta_analysis(frame, over="model", by=by, transform=transform)
    table = meta.tidy().drop(columns="term")
    fits = meta.glance()
    return meta, table.merge(fits[[*by, *(c for c in fits if c not in table)]], on=by)


meta_rho, table_rho = synthesis(correlation, ["positions", "layer_group"], "fisher_z")
meta_share, table_share = synthesis(share, ["layer_group"], None)
for table, name, what in (
    (table_rho, "correlations", "Spearman of |r| and KL over tokens within a layer, Fisher z"),
    (table_share, "explained", "r2_centred, the share of the centred update that is explained"),
):
    lead = ["positions"] if "positions" in table else []
    common.keep(
        table, name, given, shown=table[[c for c in (*lead, *columns) if c in table]],
        notes=[f"{what}; local affine map. pred_low, pred_high: where the next model's value is "
               "to be expected. k: models.", CANNOT, *common.facts(nodes)],
    )  # fmt: skip
studies = pd.concat([correlation, share.assign(positions="r2_centred")], ignore_index=True)
kept = ["model", "mixer", "positions", "layer_group", "estimate", "std_error", "conf_low",
        "conf_high", "n", "n_clusters"]  # fmt: skip
common.keep(studies[kept], "studies", given, common.facts(nodes))

# %% Transformers against recurrent models, where there are two of each
counts = share.drop_duplicates("model")["mixer"].value_counts()
if len(counts) == 2 and counts.min() >= 2:
    kinds = pd.concat(
        [meta_rho.subgroups("mixer"), meta_share.subgroups("mixer").assign(positions="r2_centred")]
    )
    shown = ["positions", "layer_group", "mixer", "estimate", "conf_low", "conf_high", "tau2", "k",
             "q_between", "q_p_value"]  # fmt: skip
    common.keep(kinds, "by_mixer", given, shown=kinds[shown],
                notes=["q_between tests that both kinds agree.", CANNOT])  # fmt: skip
else:
    print(f"by mixer: two models of each kind are needed; there are {counts.to_dict()}")

# %% Meta-regression over layers: depth (0 to 1) and kind of mixer; layers of one model depend on
# one another, so errors are cluster-robust over models, of which more than coefficients are needed
moderators = "~ depth + mixer" if len(counts) == 2 else "~ depth"
if len(nodes) <= (3 if len(counts) == 2 else 2):
    moderators = "~ depth"
if len(nodes) > 2:
    with warnings.catch_warnings(record=True) as caught:
        slopes = gl.meta_analysis(
            layered[layered["layer"] > 1], over="model", by=["positions"], moderators=moderators,
            robust="model",
        ).tidy()  # fmt: skip
    common.keep(
        slopes, "meta_regression", given,
        ["Fisher z of the correlation within a layer, without layer 1, on "
         f"{moderators.strip('~ ')}; cluster-robust over {len(nodes)} models.",
         *sorted({str(w.message) for w in caught}), CANNOT],
    )  # fmt: skip
else:
    print(f"meta-regression: more than 2 models are needed; there are {len(nodes)}")

# %% Figures
if len(nodes) > 1:
    common.keep_figure(plots.plot_forest(meta_rho), "forest_correlations", given)
    axes = plots.plot_forest(meta_share)
    axes.set_xlabel("share of the centred update explained")
    common.keep_figure(axes, "forest_explained", given)
    common.keep_figure(plots.plot_funnel(meta_rho), "funnel", given)
else:
    print("forest and funnel: more than one model is needed")
