"""Every public name has a docstring that describes its parameters and an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import geomstats_lm

MODULES = sorted(m.name for m in pkgutil.walk_packages(geomstats_lm.__path__, "geomstats_lm."))
PUBLIC = sorted(set(geomstats_lm.__all__) - {"__version__"})


@pytest.mark.parametrize("name", [m for m in MODULES if not m.endswith("cli")])
def test_examples_run(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    importlib.import_module(name)
    # a verb may have the name of its module, so the module is looked up, not the attribute
    import sys

    failed, _ = doctest.testmod(sys.modules[name], optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstring_is_complete(name: str) -> None:
    function = getattr(geomstats_lm, name)
    text = inspect.getdoc(function) or ""
    assert ">>>" in text, f"{name} has no example"
    undescribed = [
        parameter
        for parameter in inspect.signature(function).parameters
        if not re.search(rf"(^|\W)\**{parameter}\b[^\n]*(:|$|,)", text, flags=re.MULTILINE)
    ]
    assert not undescribed, f"{name} does not describe {undescribed}"
    if inspect.signature(function).return_annotation not in (None, "None"):
        assert re.search(r"^Returns\n-{3,}", text, flags=re.MULTILINE), f"{name}: no Returns"
