"""What must a reader know before believing the numbers?

Few clusters, fits that did not converge, the floor of precision, errors of 1 and above, massive
tokens, dequantized or untrained weights, references of unequal size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from geomstats_lm.findings import Findings, ModelFindings
from geomstats_lm.main_table import n_documents

ENOUGH_CLUSTERS = 40  # from here on the default interval holds what it says, in simulations
FLOOR = 1e-8  # of a KL between float32 outputs, whatever was measured


def cautions(findings: Findings) -> list[str]:
    """Sentences that warn, the gravest first.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    list of str
        Empty where there is nothing to warn of.
    """
    found: list[str] = []
    for model in findings.models:
        for leaf in model.incomplete:
            found.append(
                f"{model.key}: {leaf} is not finished and was left out; run its step again and it "
                "carries on."
            )
        found += [*_weights(model), *_clusters(model), *_fits(model), *_precision(model)]
        found += _tokens(model)
    return found + _between(findings)


def _weights(model: ModelFindings) -> list[str]:
    attrs = model.attrs
    found = []
    if attrs.get("untrained"):
        found.append(f"{model.key}: untrained, its weights are random.")
    if attrs.get("dequantized"):
        found.append(f"{model.key}: weights were dequantized from a GGUF file.")
    if attrs.get("model_dtype", "float32") not in ("float32", "float64"):
        found.append(f"{model.key}: ran in {attrs['model_dtype']}, which rounds its states.")
    return found


def _clusters(model: ModelFindings) -> list[str]:
    leaf = model.leaves.get("perturbation", model.leaves.get("geometry"))
    if leaf is None or "document" not in leaf.coords:
        return []
    number = n_documents(leaf)
    if number >= ENOUGH_CLUSTERS:
        return []
    if number < 2:
        return [f"{model.key}: one evaluation document, so nothing has an interval."]
    if number < 10:
        text = "the intervals are worth little, however narrow they look"
    else:
        text = "percentile intervals are a little too narrow below 40; robust ones hold better"
    return [f"{model.key}: {number} evaluation documents; {text}."]


def _fits(model: ModelFindings) -> list[str]:
    found = []
    if model.unconverged:
        labels = ", ".join(model.unconverged)
        found.append(f"{model.key}: fits of {labels} did not converge everywhere.")
    if model.correlation is not None:
        table = model.correlation.tidy()
        undefined = table[~table["converged"].astype(bool) & (table["reason"] != "")]
        if len(undefined):
            reasons = ", ".join(sorted(set(undefined["reason"])))
            found.append(
                f"{model.key}: {len(undefined)} of {len(table)} correlations are undefined or have "
                f"no interval ({reasons})."
            )
    return found


def _precision(model: ModelFindings) -> list[str]:
    leaf: Any = model.leaves.get("perturbation")
    if leaf is None or "kl" not in leaf:
        return []
    floor = FLOOR
    if "kl_floor" in leaf:
        floor = max(floor, float(leaf["kl_floor"].max()))
    values = leaf["kl"].values
    values = values[np.isfinite(values)]
    share = float((values < 10 * floor).mean()) if values.size else 0.0
    if share < 0.01:
        return []
    return [
        f"{model.key}: {share:.0%} of the damages lie below ten times the floor of precision "
        f"({floor:.1e} nats), where ranks are partly rounding."
    ]


def _tokens(model: ModelFindings) -> list[str]:
    leaf = model.leaves.get("geometry")
    if leaf is None or "n" not in leaf:
        return []
    found = []
    if "n_massive" in leaf:
        massive = leaf["n_massive"].values
        if massive.max() > 0:
            found.append(
                f"{model.key}: up to {int(massive.max())} massive tokens a layer (norm above five "
                "times the median) were left out."
            )
    if "n_error_above_one" in leaf:
        above = (leaf["n_error_above_one"] / leaf["n"].where(leaf["n"] > 0)).isel(model=0)
        for label in leaf.function_class.values:
            share = float(above.sel(function_class=label).mean())
            if str(label) != "identity" and share > 0.1:
                found.append(
                    f"{model.key}: {label} has an error of 1 or more at {share:.0%} of tokens, "
                    "where no value is forced."
                )
    return found


def _between(findings: Findings) -> list[str]:
    found = []
    sizes = {}
    for model in findings.models:
        leaf = model.leaves.get("geometry")
        if leaf is not None and "n_reference" in leaf:
            sizes[model.key] = int(leaf["n_reference"].max())
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {n:,}" for key, n in sizes.items())
        found.append(
            f"Reference tokens differ between models ({listed}); errors fall as their number grows."
        )
    texts = {m.attrs.get("text_checksum", "") for m in findings.models if m.leaves}
    if len(texts) > 1:
        found.append("The models did not read the same text.")
    return found
