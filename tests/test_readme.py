"""The README is a promise: its Python runs, its commands exist, its TOML is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from geomstats_lm.declaration import StudyConfig
from tests.families import TABLE, readme_with_table

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("python"))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    shown = capsys.readouterr().out
    assert "conf_low" in shown and "affine" in shown


def test_toml_is_a_valid_study() -> None:
    import tomllib

    (declared,) = blocks("toml")
    config = StudyConfig.model_validate(tomllib.loads(declared))
    assert config.windows.n_windows == (120, 24)


def test_first_two_lines_set_everything_up() -> None:
    main_job, tests = blocks("bash")[0].strip().splitlines()
    assert main_job.endswith("geomstats-lm run analyses/quickstart.toml")
    assert tests.endswith("pytest")
    ci = (Path(__file__).parent.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert "\npytest " in ci


def test_table_of_families_is_what_the_tests_found() -> None:
    assert readme_with_table(README) == README  # else: python -m tests.families
    shown = README.split("<!-- families")[1].split("<!-- end")[0]
    families = pd.read_csv(TABLE, keep_default_na=False)["family"]
    assert all(re.search(rf"(?<![\w-]){name}(?![\w-])", shown) for name in families)
