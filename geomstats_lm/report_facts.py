"""What was run, and how is it cited?  Everything that the leaves' attributes say of themselves."""

from __future__ import annotations

from typing import Any

import pandas as pd

from geomstats_lm.cube import settings_of
from geomstats_lm.findings import Findings, ModelFindings
from geomstats_lm.table_files import Table

METHOD_PAPER = "arXiv:2604.02459"


def settings_table(findings: Findings) -> Table:
    """What was run: a row a fact, a column a model.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    Table
    """
    columns: dict[str, dict[str, str]] = {m.key: _facts(m) for m in findings.models}
    facts = dict.fromkeys(fact for column in columns.values() for fact in column)
    frame = pd.DataFrame(
        [{"fact": fact, **{k: c.get(fact, "–") for k, c in columns.items()}} for fact in facts]
    )
    return Table(
        "settings",
        "Models, text, settings, versions",
        frame,
        display=frame.rename(columns={"fact": ""}),
    )


def _facts(model: ModelFindings) -> dict[str, str]:
    attrs = model.attrs
    facts = {
        "model": attrs.get("model_name", model.key),
        "source": attrs.get("model_source"),
        "revision": attrs.get("revision"),
        "architecture": attrs.get("architecture"),
        "parameters": _thousands(attrs.get("n_parameters")),
        "blocks": attrs.get("n_layers"),
        "dims": attrs.get("dim"),
        "vocabulary": _thousands(attrs.get("vocabulary")),
        "type of weights": attrs.get("model_dtype"),
        "parameter checksum (SHA-256)": _short(attrs.get("parameter_checksum")),
        "tokenizer": attrs.get("tokenizer"),
        "text checksum (SHA-256)": _short(attrs.get("text_checksum")),
        "windows": attrs.get("n_windows"),
        "tokens a window": attrs.get("window_length"),
        "documents": attrs.get("n_documents"),
        "seed of the split": attrs.get("split_seed"),
        "software": attrs.get("software"),
        "leaves": ", ".join([*model.leaves, *(f"{n} (not finished)" for n in model.incomplete)]),
    }
    geometry, damage = model.leaves.get("geometry"), model.leaves.get("perturbation")
    if geometry is not None:
        made = settings_of(geometry).get("decomposition", {})
        facts |= {
            "function classes": ", ".join(str(v) for v in geometry.function_class.values),
            "neighbours k": made.get("k", attrs.get("k")),
            "ridge": attrs.get("ridge"),
            "target, metric": ", ".join(
                str(made[n]) for n in ("target", "metric") if n in made
            ) or None,
            "no neighbours from the same": made.get("exclude"),
        }  # fmt: skip
        if "n_reference" in geometry:
            facts["reference tokens"] = _thousands(int(geometry["n_reference"].max()))
    if damage is not None:
        made = settings_of(damage)
        facts |= {
            "positions": ", ".join(str(v) for v in damage.positions.values),
            "single positions a window": made.get("n_single"),
            "controls": ", ".join(made.get("controls", [])) or None,
            "seed of the perturbation": made.get("seed"),
        }
        if "kl_floor" in damage:
            facts["KL when nothing is changed"] = f"{float(damage['kl_floor'].max()):.1e} nats"
    if model.correlation is not None:
        chosen = model.correlation.settings
        facts["correlation"] = ", ".join(
            str(chosen[n]) for n in ("method", "norm", "interval") if n in chosen
        )
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _thousands(value: Any) -> str | None:
    return None if value is None else f"{int(value):,}"


def _short(checksum: str | None) -> str | None:
    return f"{checksum[:16]}…" if checksum else None


def citation(findings: Findings) -> tuple[str, str]:
    """What to name, as a sentence and as BibTeX.

    Parameters
    ----------
    findings : Findings

    Returns
    -------
    tuple of str
    """
    from geomstats_lm import __version__

    sums = sorted({str(m.attrs["parameter_checksum"])[:12] for m in findings.models
                   if m.attrs.get("parameter_checksum")})  # fmt: skip
    text = (
        f"Made with geomstats_lm {__version__}. Please name the version, the models with their "
        f"parameter checksums ({', '.join(sums) or 'not recorded'}) and the text. The "
        f"decomposition and its perturbation follow {METHOD_PAPER}."
    )
    bibtex = (
        "@software{geomstats_lm,\n  author = {{The geomstats_lm authors}},\n"
        "  title = {geomstats_lm: statistics for language-model internals},\n"
        f"  version = {{{__version__}}}\n}}"
    )
    return text, bibtex
