"""How does a report become one page that needs nothing but itself?

Figures are inline SVG whose black is the page's text colour, tables are HTML, the style sheet and
the script that sorts tables are inside; a policy in the page forbids it any request.
"""

from __future__ import annotations

import io
import re
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from geomstats_lm.table_files import Table

NUMBER = r"[-−+]?[\d.,]+(e[-+]\d+)?( [\[(][-−–\d.,\s]+[\])])?"  # and its interval
OPEN_ROWS = 30  # longer tables are folded away


def render(context: dict[str, Any]) -> str:
    """The page as HTML.

    Parameters
    ----------
    context : dict
        What the template ``report_template.html`` names.

    Returns
    -------
    str
    """
    import jinja2

    source = resources.files("geomstats_lm").joinpath("report_template.html")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"svg": inline_svg, "table": html_table, "folded": is_long}
    return environment.from_string(source.read_text(encoding="utf-8")).render(context)


def inline_svg(figure: Figure, name: str, caption: str) -> Any:
    """A figure as an SVG element; its ids start with `name`, since a page holds many figures."""
    import markupsafe

    buffer = io.StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "geomstats_lm"}
    with rc_context(settings):
        figure.savefig(
            buffer, format="svg", transparent=True, dpi=200, bbox_inches="tight", pad_inches=0.04,
            metadata={"Date": None},
        )  # fmt: skip
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    # black and seaborn's near-black are the page's own text colour, light or dark
    text = re.sub(r"#(000000|262626)\b", "currentColor", text)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
    label = markupsafe.escape(caption)
    text = re.sub(
        r"<svg ([^>]*)>",
        lambda m: (
            "<svg " + re.sub(r'(width|height)="[^"]*"\s*', "", m[1]) + f' role="img" '
            f'aria-label="{label}" style="width:{width * 4 / 3:.0f}px">'
        ),
        text,
        count=1,
    )
    return markupsafe.Markup(text)


def is_long(table: Table) -> bool:
    """Whether a table is folded away."""
    return len(table.frame) > OPEN_ROWS


def html_table(table: Table) -> Any:
    """A table with its unrounded numbers behind the rounded ones, for sorting and tooltips."""
    import markupsafe

    escape = markupsafe.escape
    shown = table.shown().reset_index(drop=True)
    raw = table.chosen() if table.display is None else None
    numeric = [
        raw is not None and pd.api.types.is_numeric_dtype(raw.iloc[:, j])
        for j in range(shown.shape[1])
    ]
    right = [n or _looks_numeric(shown.iloc[:, j]) for j, n in enumerate(numeric)]
    head = "".join(
        f'<th scope="col"{_right(right[j])}><button type="button">{escape(name)}</button></th>'
        for j, name in enumerate(shown.columns)
    )
    rows = []
    for i in range(len(shown)):
        cells = []
        for j in range(shown.shape[1]):
            value = ""
            if numeric[j] and raw is not None:
                number = float(raw.iloc[i, j])  # type: ignore[arg-type]
                value = f' data-value="{number:.10g}"' if np.isfinite(number) else ' data-value=""'
            cells.append(f"<td{_right(right[j])}{value}>{escape(shown.iloc[i, j])}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escape(table.caption)}</caption>"
    body = "\n".join(rows)
    return markupsafe.Markup(
        f'<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _looks_numeric(column: pd.Series) -> bool:
    texts = [t for t in column if t != "–"]
    return bool(texts) and all(re.fullmatch(NUMBER, str(t)) for t in texts)


def _right(yes: bool) -> str:
    return ' class="number"' if yes else ""
