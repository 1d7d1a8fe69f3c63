"""How do the tables of a report leave it: CSV, Parquet, Markdown, LaTeX?

CSV and Parquet hold every column unrounded; Markdown and LaTeX hold what a reader wants to see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from geomstats_lm.statistics.results import latex_table, markdown_table, rounded

PAGE = 40  # rows that fit on a page
PREAMBLE = r"""\documentclass[8pt]{extarticle}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\usepackage[T1]{fontenc}
\usepackage{booktabs,longtable}
\begin{document}\scriptsize
"""


@dataclass(frozen=True)
class Table:
    """A table of the report: its frame, and the columns (with their headings) that are shown.

    ``display``, where there is one, is shown in their place: strings already.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    columns: dict[str, str] = field(default_factory=dict)
    display: pd.DataFrame | None = None

    def chosen(self) -> pd.DataFrame:
        """The shown columns that there are, unrounded, under their own names."""
        return self.frame[[c for c in self.columns if c in self.frame]]

    def shown(self) -> pd.DataFrame:
        """The same as strings under their headings."""
        if self.display is not None:
            return self.display
        return rounded(self.chosen()).rename(columns=self.columns)


def write_tables(tables: list[Table], folder: Path) -> list[Path]:
    """Write every table in four formats, and one LaTeX file that holds them all.

    Parameters
    ----------
    tables : list of Table
    folder : Path
        Made if it is not there.

    Returns
    -------
    list of Path
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table in tables:
        shown = table.shown()
        latex = latex_table(shown.map(_printable), table.caption, long=len(shown) > PAGE)
        for suffix, text in (
            ("csv", table.frame.to_csv(index=False)),
            ("md", f"{table.caption}\n\n{markdown_table(shown.map(_one_line))}\n"),
            ("tex", latex),
        ):
            path = folder / f"{table.name}.{suffix}"
            path.write_text(text, encoding="utf-8")
            written.append(path)
        path = folder / f"{table.name}.parquet"
        _with_types(table.frame).to_parquet(path, engine="pyarrow", index=False)
        written.append(path)
    path = folder / "all_tables.tex"
    inputs = "\n\\clearpage\n".join(f"\\input{{{table.name}.tex}}" for table in tables)
    path.write_text(f"{PREAMBLE}{inputs}\n\\end{{document}}\n", encoding="utf-8")
    return [*written, path]


def _with_types(frame: pd.DataFrame) -> pd.DataFrame:
    """One type a column, which Parquet asks for: mixed ones (a k that is absent) become text."""
    mixed = [c for c in frame if frame[c].dtype == object and len({type(v) for v in frame[c]}) > 1]
    return frame.assign(**{str(c): frame[c].map(str) for c in mixed}) if mixed else frame


def _one_line(text: str) -> str:
    return text.replace("\n", "↵")


def _printable(text: str) -> str:
    """What pdflatex has letters for; all else as its code point."""
    return "".join(
        c if c in "–∞−" or (c.isprintable() and ord(c) < 256) else f"U+{ord(c):04X}" for c in text
    )
