"""What is declared once is declared the same everywhere, and what is declared is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# import name where it is not the distribution's; what others need without our importing it
IMPORTED_AS = {"gguf": None, "accelerate": None, "pyarrow": None}
USED_BY = {
    "accelerate": "transformers loads GGUF files with it",
    "gguf": "transformers loads GGUF files with it",
    "jinja2": "pandas writes LaTeX with it",
    "pyarrow": "pandas writes Parquet with it",
}


def requirements(lines: list[str]) -> dict[str, str]:
    split = [re.match(r"([A-Za-z0-9_.-]+)(\[[^\]]*\])?(.*)", line) for line in lines]
    return {m[1].lower().replace("-", "_"): (m[3] or "").strip() for m in split if m}


def test_environment_file_says_what_pyproject_says() -> None:
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    nested = [d for d in environment["dependencies"] if isinstance(d, dict)]
    listed = requirements([d for d in plain if not d.startswith(("python", "pip"))])
    listed |= requirements(nested[0]["pip"]) if nested else {}
    assert listed == requirements(PROJECT["dependencies"])
    assert f"python{PROJECT['requires-python']}" in plain


def test_every_dependency_is_used() -> None:
    imported = set()
    for file in (ROOT / "geomstats_lm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    unused = set(requirements(PROJECT["dependencies"])) - imported - set(USED_BY)
    assert not unused
    declared = set(requirements(PROJECT["dependencies"])) | {"geomstats_lm"}
    foreign = imported - declared - set(sys.stdlib_module_names)
    # what a declared package brings and re-exports by design
    assert foreign <= {"matplotlib", "markupsafe"}


def test_import_is_quick_and_names_are_verbs() -> None:
    code = (
        "import sys, geomstats_lm as g; assert 'torch' not in sys.modules; "
        "import geomstats_lm.geometry; "
        "assert callable(g.geometry) and g.geometry.__module__ == 'geomstats_lm.geometry'; "
        "assert all(callable(getattr(g, n)) or n == '__version__' for n in g.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_version_is_one() -> None:
    import geomstats_lm

    assert geomstats_lm.__version__ == PROJECT["version"]
