"""Which tokens does the report show?  Those with the largest residual and damage, in their context.

Text comes from the documents, if they are given, else from the tokenizer; where neither is there
the labels of the tokens are shown, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.findings import Findings, ModelFindings
from geomstats_lm.table_files import Table
from geomstats_lm.token_strips import strip_legend, token_strip
from geomstats_lm.top_tokens import (
    TextUnavailable,
    in_context,
    largest,
    measured,
    text_source,
)


def tokens_in_context(
    findings: Findings, corpus: pd.DataFrame | None, tokenizers: Mapping[str, Any] | None
) -> tuple[Table | None, list[dict[str, Any]], list[str]]:
    """The table of tokens, their strips, and what could not be shown.

    Parameters
    ----------
    findings : Findings
    corpus : pandas.DataFrame, optional
        The documents.
    tokenizers : mapping, optional
        Model key to tokenizer or its folder.

    Returns
    -------
    tuple
        Table or None; a dict of title, legend and strips for every group; sentences.
    """
    frames, groups, notes = [], [], []
    for model in findings.models:
        found = largest(model)
        if not len(found):
            notes.append(f"{model.key}: neither residuals nor damage were measured.")
            continue
        texts: Any = None
        try:
            texts = text_source(model, corpus, (tokenizers or {}).get(model.key))
        except TextUnavailable as reason:
            notes.append(f"{model.key}: the tokens' text is not available: {reason}.")
        words = []
        for kind, leaf, values in measured(model):
            rows = found[found["of"] == kind]
            if texts is not None and len(rows):
                group, own = _strips(model, kind, leaf, values, rows, texts)
                groups.append(group)
                words += own
        frames.append(found.assign(text=words) if words else found)
    if not frames:
        return None, groups, notes
    frame = pd.concat(frames, ignore_index=True).drop(columns="index")
    headings = {
        "model": "model", "of": "largest", "rank": "rank", "value": "value", "text": "token",
        "document": "document", "position": "position", "token_id": "token id",
        "char_start": "from character", "char_end": "to",
    }  # fmt: skip
    caption = "Tokens with the largest residual and the largest damage"
    return Table("tokens", caption, frame, headings), groups, notes


def _strips(
    model: ModelFindings, kind: str, leaf: xr.Dataset, values: np.ndarray, rows: pd.DataFrame,
    texts: Any,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    import markupsafe

    label, units = ("relative error", "") if kind == "residual" else ("KL", "nats")
    finite = values[np.isfinite(values)]
    # one token alone must not set the scale
    limits = (float(np.quantile(finite, 0.01)), float(np.quantile(finite, 0.99)))
    strips, words = [], []
    for row in rows.to_dict("records"):
        near = in_context(leaf, row["index"])
        pieces = texts(leaf, near)
        focus = int(np.flatnonzero(near == row["index"])[0])
        words.append(pieces[focus])
        html = token_strip(
            pieces, values[near], label=label, units=units, kind=kind, limits=limits, focus=focus,
            legend=False, style=False,
        )  # fmt: skip
        where = f"{label} {row['value']:.3g}{' ' + units if units else ''}, " + ", ".join(
            f"{name} {row[name]}" for name in ("document", "position") if name in row
        )
        strips.append({"caption": where, "html": markupsafe.Markup(html)})
    title = f"{model.key}, {model.main_class}: largest {kind}"
    legend = markupsafe.Markup(strip_legend(label, units, kind, limits))
    return {"title": title, "legend": legend, "strips": strips}, words
