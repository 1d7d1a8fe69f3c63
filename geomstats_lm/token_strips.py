"""Where in a text is the residual large, where the damage?  A strip of coloured tokens.

strength of the colour = (value - low) / (high - low),  clipped to [0, 1]
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

STYLE = """\
.token-strip{--strip:230,120,0;font:0.95rem/2 ui-monospace,Menlo,Consolas,monospace;\
white-space:pre-wrap;overflow-wrap:anywhere}
.token-strip.damage{--strip:0,114,178}
.token-strip span{border-radius:3px;padding:1px 0;\
background:rgba(var(--strip),calc(var(--a)*.75))}
.token-strip .focus{outline:2px solid currentColor;outline-offset:1px}
.token-strip .none{opacity:.6;background:none}
.token-strip-legend{font:0.8rem system-ui,sans-serif;display:flex;gap:.5em;align-items:center;\
flex-wrap:wrap}
.token-strip-legend i{display:inline-block;width:7em;height:.8em;border-radius:3px;\
background:linear-gradient(90deg,rgba(var(--strip),0),rgba(var(--strip),.75))}"""


def token_strip(
    tokens: Sequence[str],
    values: Sequence[float] | np.ndarray,
    *,
    label: str = "value",
    units: str = "",
    kind: str = "residual",
    limits: tuple[float, float] | None = None,
    focus: int | None = None,
    legend: bool = True,
    style: bool = True,
) -> str:
    """A text whose tokens are coloured by a value, as HTML.

    Parameters
    ----------
    tokens : sequence of str
        The text, token by token, spaces included.
    values : sequence of float
        One per token; NaN is shown without colour.
    label, units : str
        What the values are, for the legend and for every token's tooltip.
    kind : {"residual", "damage"}
        Orange or blue.
    limits : (float, float), optional
        Values of no and of full colour; the range of the finite values by default.
    focus : int, optional
        Index of a token to outline.
    legend : bool
        Whether a legend is put above the text.
    style : bool
        Whether the style sheet comes along; once a page is enough.

    Returns
    -------
    str
        Works on light and dark pages; special characters are escaped.

    Raises
    ------
    ValueError
        If there are not as many values as tokens, or an argument is not accepted.

    Examples
    --------
    >>> print(token_strip(["a", " <b>"], [0.0, 2.0], style=False, legend=False))
    <div class="token-strip residual"><span style="--a:0.00" title="value 0">a</span><span \
style="--a:1.00" title="value 2"> &lt;b&gt;</span></div>
    """
    numbers = np.asarray(values, dtype=float)
    if numbers.shape != (len(tokens),):
        raise ValueError(f"values: {numbers.shape} given for {len(tokens)} tokens")
    if kind not in ("residual", "damage"):
        raise ValueError(f"kind={kind!r}: accepted are 'residual' and 'damage'")
    if focus is not None and not 0 <= focus < len(tokens):
        raise ValueError(f"focus={focus}: accepted are 0 to {len(tokens) - 1}")
    finite = numbers[np.isfinite(numbers)]
    if limits is None:
        limits = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    low, high = limits
    if not low <= high:
        raise ValueError(f"limits={limits}: accepted are (low, high) with low <= high")
    unit = f" {units}" if units else ""
    spans = []
    for index, (token, number) in enumerate(zip(tokens, numbers)):
        here = " focus" if index == focus else ""
        if np.isfinite(number):
            # all alike: no token stands out
            share = float(np.clip((number - low) / (high - low), 0, 1)) if high > low else 0.0
            kinds = ' class="focus"' if here else ""
            title = html.escape(f"{label} {number:.4g}{unit}", quote=True)
            spans.append(
                f'<span{kinds} style="--a:{share:.2f}" title="{title}">{_shown(token)}</span>'
            )
        else:
            title = html.escape(f"no {label}", quote=True)
            spans.append(f'<span class="none{here}" title="{title}">{_shown(token)}</span>')
    parts = [f"<style>{STYLE}</style>"] if style else []
    if legend:
        parts.append(strip_legend(label, units, kind, limits))
    parts.append(f'<div class="token-strip {kind}">{"".join(spans)}</div>')
    return "".join(parts)


def strip_legend(label: str, units: str, kind: str, limits: tuple[float, float]) -> str:
    """What the colours of a strip mean, as HTML."""
    unit = f" {units}" if units else ""
    return (
        f'<div class="token-strip {kind} token-strip-legend">{html.escape(label)}: '
        f"{limits[0]:.3g}<i></i>{limits[1]:.3g}{html.escape(unit)} and above</div>"
    )


def _shown(token: str) -> str:
    """Escaped; line breaks are marked, since a token may be nothing else."""
    return html.escape(token, quote=False).replace("\n", "↵\n")
