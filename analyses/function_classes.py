"""How much capacity does a tokenwise map need, and would more reference text help?

e = mean |D - D_hat| / |D| on held-out documents, against k, ridge, rank, hidden size and N;
effective degrees of freedom tr(H) beside each setting
"""

# %% Models and text. Reference tokens predict reference tokens of other documents, so that the
# evaluation documents stay untouched
import warnings

import common
import pandas as pd

import geomstats_lm as gl
from geomstats_lm import plots

given = common.options(
    __doc__, query_windows=12, k=(4, 8, 16, 32, 64, 128), ridge=(0.001, 0.01, 0.1, 1.0, 10.0),
    rank=(1, 2, 4, 8, 16, 32), hidden=(4, 32),
)  # fmt: skip
nodes = {name: common.node(name, given) for name in given.models}

# %% First, middle and last layer; one setting moves, the others keep their defaults
GRIDS = [
    ("k", ["local_mean", "linear"], {"k": given.k, "ridge": (0.01,)}),
    ("k", ["affine"], {"k": given.k, "ridge": (1.0,)}),
    ("ridge", ["linear", "affine", "affine[scope=global]"], {"k": (32,), "ridge": given.ridge}),
    ("rank", ["low_rank"], {"k": (32,), "ridge": (0.01,), "rank": given.rank}),
    ("hidden", [f"mlp[hidden={size}]" for size in given.hidden], {}),
]
tables, curves, limits, cautions = [], [], [], set()
for name, node in nodes.items():
    depth = int(node["activations"].attrs["n_layers"])
    layers = sorted({1, (depth + 1) // 2, depth})
    for setting, classes, grid in GRIDS:
        with warnings.catch_warnings(record=True) as caught:
            held_out = gl.cross_validate(
                node, classes, **grid, windows=given.query_windows,
                layers=layers if setting != "hidden" else layers[1:2],
            )  # fmt: skip
        cautions |= {f"{name}: {warning.message}" for warning in caught}
        tables.append(held_out.tidy().assign(model=name, setting=setting))
    curve = gl.reference_curve(
        node, ["local_mean", "affine", "affine[scope=global]"], layers=layers,
        windows=given.query_windows, draws=given.n_boot,
    )  # fmt: skip
    curves.append(curve.tidy().assign(model=name))
    limits.append(curve.glance().assign(model=name))

# %% One table of all settings
held = pd.concat(tables, ignore_index=True)
held["value"] = [row[row["setting"]] for _, row in held.iterrows()]
order = [
    "model", "layer", "setting", "value", "function_class", "effective_df", "estimate",
    "std_error", "n", "n_clusters",
]  # fmt: skip
held = held.sort_values(["model", "setting", "layer"], kind="stable")[[*order, "class_name"]]
about = (
    f"estimate: held-out relative error |r| / |D|, its standard error over documents; "
    f"{given.query_windows} windows of {given.length} tokens are predicted. effective_df: degrees "
    "of freedom per token of the fit (trace of the smoother)."
)
common.keep(
    held, "capacity", given, [about, *sorted(cautions), *common.facts(nodes)], shown=held[order]
)
limit = pd.concat(limits, ignore_index=True)
common.keep(
    limit, "reference_limits", given,
    ["e(N) = limit + b N^-exponent of evaluation tokens; estimate: the limit as N grows, with its "
     "95 % interval over documents; k = 32.", *common.facts(nodes)],
)  # fmt: skip
curve = pd.concat(curves, ignore_index=True)
common.keep(curve, "reference_curve", given, ["k = 32", *common.facts(nodes)])

# %% Figures: one panel per model (rows) and layer
for setting in dict.fromkeys(held["setting"]):
    part = held[held["setting"] == setting].rename(columns={"value": setting})
    by = "class_name" if setting != "hidden" else None
    part = part.assign(class_name="mlp") if by is None else part
    common.keep_figure(plots.plot_capacity(part, setting, by="class_name"), setting, given)
LINES = {
    ("linear", "k"): "linear, k varies", ("affine", "k"): "affine, k varies",
    ("low_rank", "rank"): "low rank, rank varies",
    ("affine[scope=global]", "ridge"): "global affine, ridge varies",
}  # fmt: skip
line = [LINES.get(pair) for pair in zip(held["class_name"], held["setting"])]
freedom = held.assign(class_name=line).dropna(subset=["class_name", "effective_df"])
freedom = freedom.assign(effective_df=freedom["effective_df"].round(1))
common.keep_figure(plots.plot_capacity(freedom, "effective_df"), "degrees_of_freedom", given)
common.keep_figure(plots.plot_capacity(curve, "n_reference"), "reference_curve", given)
