"""Statistics for language-model internals, on labelled arrays.

The verbs, in the order in which data flow through them::

    read_corpus -> windows -> load_model -> extract -> decompose -> geometry
                                                   -> perturb  -> rank_correlation

Names are imported on first use, so that ``import geomstats_lm`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomstats_lm.choosing import cross_validate as cross_validate
    from geomstats_lm.choosing import reference_curve as reference_curve
    from geomstats_lm.class_labels import known_classes as known_classes
    from geomstats_lm.class_labels import register_function_class as register_function_class
    from geomstats_lm.context import context as context
    from geomstats_lm.context import context_summary as context_summary
    from geomstats_lm.corpus import read_corpus as read_corpus
    from geomstats_lm.corpus import windows as windows
    from geomstats_lm.cube import open_cube as open_cube
    from geomstats_lm.cube import open_study as open_study
    from geomstats_lm.damage import damage_ratio as damage_ratio
    from geomstats_lm.datasets import available_models as available_models
    from geomstats_lm.datasets import example_corpus as example_corpus
    from geomstats_lm.datasets import example_node as example_node
    from geomstats_lm.datasets import example_path as example_path
    from geomstats_lm.datasets import load_example as load_example
    from geomstats_lm.decompose import decompose as decompose
    from geomstats_lm.describe import describe_model as describe_model
    from geomstats_lm.direction import residual_direction as residual_direction
    from geomstats_lm.dominant import dominant_subspaces as dominant_subspaces
    from geomstats_lm.dominant import subspace_relations as subspace_relations
    from geomstats_lm.extract import extract as extract
    from geomstats_lm.geometry import geometry as geometry
    from geomstats_lm.geometry_summary import geometry_summary as geometry_summary
    from geomstats_lm.import_activations import import_activations as import_activations
    from geomstats_lm.layer_means import layer_means as layer_means
    from geomstats_lm.models import as_language_model as as_language_model
    from geomstats_lm.models import load_model as load_model
    from geomstats_lm.nulls import exchanged as exchanged
    from geomstats_lm.nulls import forced as forced
    from geomstats_lm.nulls import isotropic as isotropic
    from geomstats_lm.parts import extract_parts as extract_parts
    from geomstats_lm.parts_geometry import parts_geometry as parts_geometry
    from geomstats_lm.perturb import perturb as perturb
    from geomstats_lm.refits import leak as leak
    from geomstats_lm.refits import permuted as permuted
    from geomstats_lm.refits import random_neighbours as random_neighbours
    from geomstats_lm.refits import untrained as untrained
    from geomstats_lm.replacements import project_off as project_off
    from geomstats_lm.replacements import project_on as project_on
    from geomstats_lm.report import report as report
    from geomstats_lm.statistics import adjust as adjust
    from geomstats_lm.statistics import cluster_bootstrap as cluster_bootstrap
    from geomstats_lm.statistics import compare_correlations as compare_correlations
    from geomstats_lm.statistics import meta_analysis as meta_analysis
    from geomstats_lm.statistics import mixed_model as mixed_model
    from geomstats_lm.statistics import ols as ols
    from geomstats_lm.statistics import quantile_regression as quantile_regression
    from geomstats_lm.statistics import rank_correlation as rank_correlation
    from geomstats_lm.statistics import test_distinct as test_distinct
    from geomstats_lm.study import run_study as run_study
    from geomstats_lm.verify import verify_study as verify_study

__version__ = "0.1.0"

# public name -> the room that holds it
_PUBLIC = {
    "available_models": "datasets",
    "load_example": "datasets",
    "example_path": "datasets",
    "example_corpus": "datasets",
    "example_node": "datasets",
    "read_corpus": "corpus",
    "windows": "corpus",
    "load_model": "models",
    "as_language_model": "models",
    "describe_model": "describe",
    "extract": "extract",
    "extract_parts": "parts",
    "import_activations": "import_activations",
    "open_study": "cube",
    "open_cube": "cube",
    "verify_study": "verify",
    "decompose": "decompose",
    "register_function_class": "class_labels",
    "known_classes": "class_labels",
    "cross_validate": "choosing",
    "reference_curve": "choosing",
    "geometry": "geometry",
    "geometry_summary": "geometry_summary",
    "layer_means": "layer_means",
    "dominant_subspaces": "dominant",
    "subspace_relations": "dominant",
    "forced": "nulls",
    "isotropic": "nulls",
    "exchanged": "nulls",
    "permuted": "refits",
    "random_neighbours": "refits",
    "untrained": "refits",
    "leak": "refits",
    "residual_direction": "direction",
    "context": "context",
    "context_summary": "context",
    "parts_geometry": "parts_geometry",
    "perturb": "perturb",
    "damage_ratio": "damage",
    "project_on": "replacements",
    "project_off": "replacements",
    "rank_correlation": "statistics",
    "compare_correlations": "statistics",
    "cluster_bootstrap": "statistics",
    "meta_analysis": "statistics",
    "mixed_model": "statistics",
    "ols": "statistics",
    "quantile_regression": "statistics",
    "test_distinct": "statistics",
    "adjust": "statistics",
    "run_study": "study",
    "report": "report",
}

__all__ = [*_PUBLIC, "__version__"]


class _Package(types.ModuleType):
    """Some verbs have the name of their room; here the name always means the verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _PUBLIC.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"geomstats_lm.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'geomstats_lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
