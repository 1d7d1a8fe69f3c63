"""Statistics for language-model internals, on labelled arrays.

The verbs, in the order in which data flow through them::

    read_corpus -> windows -> load_model -> extract -> decompose -> geometry
                                                   -> perturb  -> rank_correlation

Names are imported on first use, so that ``import geomstats_lm`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> the room that holds it
_PUBLIC = {
    "read_corpus": "corpus",
    "windows": "corpus",
    "load_model": "models",
    "extract": "extract",
    "open_study": "cube",
    "open_cube": "cube",
    "decompose": "decompose",
    "geometry": "geometry",
    "perturb": "perturb",
    "rank_correlation": "statistics",
    "run_study": "study",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"geomstats_lm.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'geomstats_lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
