"""Is what is found learned, or is it there with fresh weights already?

r2_centred, cos(D, t) beside sqrt(1 - e^2), energies beside m/d, rho_s(|r|, KL), damage ratio
"""

# %% One architecture: untrained, after 50, 200 and 800 steps, and finished
import common
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots
from geomstats_lm.geometry import beside_forced
from geomstats_lm.report import correlate

COURSE = ("gpt2-untrained", "gpt2-step50", "gpt2-step200", "gpt2-step800", "gpt2")
given = common.options(__doc__, models=COURSE)
nodes = {name: common.node(name, given, perturbed=True) for name in given.models}
FIT = "affine"


def trained_on(name: str) -> float:
    """Training tokens that a checkpoint has seen, in millions."""
    return 0.0 if name.endswith("-untrained") else common.card(name)["tokens_seen"] / 1e6


# %% Geometry, correlations and damage by layer, each with its interval over documents
MEASURES = [
    "r2_centred", "relative_error", "cos_update_tokenwise", "forced_cos_update_tokenwise",
    "cos_centred", "forced_cos_centred", "energy_update", "energy_residual",
]  # fmt: skip
tables = []
for name, node in nodes.items():
    geometry = node["geometry"].to_dataset().sel(function_class=[FIT])
    perturbation = node["perturbation"].to_dataset().sel(function_class=[FIT])
    loss = float(node["activations"].to_dataset().loss.mean())
    means = gl.layer_means(beside_forced(geometry), MEASURES, n_boot=given.n_boot).tidy()
    rho = correlate(geometry, perturbation, n_boot=given.n_boot).tidy()
    rho["measure"] = "Spearman of |r| and KL, " + rho["positions"]
    ratio = gl.damage_ratio(perturbation.sel(control=["exchanged"]), n_boot=given.n_boot).tidy()
    ratio["measure"] = "damage ratio, " + ratio["positions"]
    one = pd.concat([means, rho, ratio], ignore_index=True)
    tables.append(one.assign(model=name, training_tokens=trained_on(name), loss=loss))
columns = [
    "model", "training_tokens", "loss", "layer", "measure", "estimate", "conf_low", "conf_high",
    "n", "n_clusters",
]  # fmt: skip
course = pd.concat(tables, ignore_index=True)[columns]

# %% The table: a row per checkpoint and layer
shown = course.assign(
    text=[
        f"{v:.2f} [{low:.2f}, {high:.2f}]"
        for v, low, high in course[["estimate", "conf_low", "conf_high"]].to_numpy()
    ]
).pivot(index=["model", "training_tokens", "loss", "layer"], columns="measure", values="text")
shown = shown[list(dict.fromkeys(course["measure"]))].loc[list(dict.fromkeys(course["model"]))]
m_over_d = common.COMPONENTS / next(iter(nodes.values()))["geometry"].attrs["dim"]
common.keep(
    course, "training", given, shown=shown.reset_index(),
    notes=[
        "Local affine map. training_tokens in millions (0: fresh weights); loss: nats per token on "
        "all windows. Beside cosines stand what the residual's size forces, over the same tokens.",
        f"Energies in the {common.COMPONENTS} dominant tokenwise directions of the reference, "
        f"about its mean; a random direction has {m_over_d:.3f}. Damage ratio: KL over that of "
        "another token's residual of the same norm. single: one position patched at "
        "a time; all: at once.",
        *common.facts(nodes),
    ],
)  # fmt: skip

# %% Figures: a line a checkpoint
seen = course.assign(
    checkpoint=[f"{t:.2g} M tokens" if t else "untrained" for t in course["training_tokens"]]
).drop(columns=["model", "n"])
for measure, label, name in (
    ("r2_centred", "share of centred update explained", "explained"),
    ("cos_update_tokenwise", "cosine of update and tokenwise part", "cosine"),
    ("energy_residual", "residual's energy in the\ndominant tokenwise subspace", "energy"),
    ("Spearman of |r| and KL, single", "Spearman of |residual| and KL", "correlation"),
    ("damage ratio, single", "KL of residual / KL of exchanged", "damage_ratio"),
):
    part = seen[seen["measure"] == measure].drop(columns="measure")
    figure = plots.plot_layer_profile(part, "estimate", by="checkpoint", label=label)
    common.keep_figure(figure, name, given)
