"""A declared study from TOML to table, its second run, and everything that can be wrong in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from geomstats_lm import open_study, run_study
from geomstats_lm.cli import app
from geomstats_lm.declaration import StudyError, read_study
from tests.text_samples import STORIES, VOCABULARY, character_tokenizer

CLASSES = '["identity", "mean", "affine"]'


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a tiny GPT-2, text and a study that was run once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("study")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=16, n_layer=4, n_head=2, vocab_size=VOCABULARY, n_positions=32,
            bos_token_id=2, eos_token_id=2,
        )  # fmt: skip
        GPT2LMHeadModel(config).save_pretrained(folder / "tiny")
    character_tokenizer().save_pretrained(folder / "tiny")
    lines = [json.dumps({"text": text}) for text in STORIES]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run_study(declare(folder), progress=False)
    return folder


def declare(folder: Path, name: str = "study.toml", **changes: str) -> Path:
    keys = {
        "models": '["tiny", {path = "tiny", untrained = true}]',
        "corpus": '"text.jsonl"',
        "output": '"out"',
        "windows": "{length = 16, reference = 20, evaluation = 12, evaluation_share = 0.5}",
        "decompose": f"{{classes = {CLASSES}, k = 8}}",
        "perturb": "{n_single = 3}",
        "correlate": "{n_boot = 100}",
    } | changes
    path = folder / name
    path.write_text("\n".join(f"{k} = {v}" for k, v in keys.items() if v), encoding="utf-8")
    return path


def test_study_writes_store_tables_and_figures(made: Path) -> None:
    out = made / "out"
    tree = open_study(out / "study.zarr")
    assert set(tree.children) == {"tiny", "tiny-untrained", "statistics"}
    stored = tree["statistics/rank_correlation"].to_dataset()
    tidy = pd.read_csv(out / "correlations.csv")
    np.testing.assert_allclose(stored.estimate.values, tidy["estimate"])
    assert stored.function_class.values.tolist() == tidy["function_class"].tolist()
    assert set(tree["tiny"].children) == {
        "activations", "decomposition", "geometry", "perturbation",
    }  # fmt: skip
    table = pd.read_csv(out / "table.csv")
    assert len(table) == 2 * 4 * 3  # models x layer groups x classes
    assert table["layer_group"].iloc[0] == "1 (embedding)"
    assert (table["n_reference"] == 20 * 15).all() and (table["k"] == 8).all()
    for mode in ("single", "all"):
        fitted = table[table["function_class"] == "affine"]
        assert fitted[f"damage_ratio_{mode}"].notna().all()
        assert (fitted[f"spearman_{mode}_low"] <= fitted[f"spearman_{mode}_high"]).all()
    assert set(table.loc[table["untrained"], "model"]) == {"tiny-untrained"}
    markdown = (out / "table.md").read_text(encoding="utf-8")
    assert "Untrained (fresh weights): tiny-untrained." in markdown and "k = 8" in markdown
    figures = sorted(p.name for p in (out / "figures").glob("*.png"))
    assert len(figures) == 4
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert "tiny-untrained: untrained, its weights are random." in page
    again = pd.read_csv(out / "report" / "tables" / "main.csv")
    pd.testing.assert_frame_equal(again, table)  # one computation, two places
    assert not (made / "study.zarr").exists()  # nothing beside the output folder


def test_table_is_what_the_store_says(made: Path) -> None:
    """Every number of a row again, by hand from the leaves."""
    table = pd.read_csv(made / "out" / "table.csv")
    row = table[(table.model == "tiny") & (table.function_class == "affine")
                & (table.layer_group == "2 (early)")].iloc[0]  # fmt: skip
    node = open_study(made / "out" / "study.zarr")["tiny"]
    parts = node["decomposition"].to_dataset().sel(layer=2, function_class="affine").isel(model=0)
    usable = (parts.position.values > 0) & ~parts.is_massive.values
    residual = np.linalg.norm(parts.residual.values.astype(float), axis=1)[usable]
    update = np.linalg.norm(parts["update"].values.astype(float), axis=1)[usable]
    assert row["relative_error"] == pytest.approx((residual / update).mean(), rel=1e-5)
    damage = node["perturbation"].to_dataset().sel(layer=2, function_class="affine").isel(model=0)
    single = damage.sel(positions="single")
    kl, patched = single.kl.values, single.patched.values
    ratio = np.nansum(kl) / np.nansum(single.kl_control.values)
    assert row["damage_ratio_single"] == pytest.approx(ratio, rel=1e-6)
    norms = np.full(len(kl), np.nan)
    norms[usable] = residual
    rho = pd.Series(kl[patched]).corr(pd.Series(norms[patched]), method="spearman")
    assert row["spearman_single"] == pytest.approx(rho, rel=1e-5)


def test_second_run_does_nothing_and_a_changed_study_is_refused(made: Path) -> None:
    out = made / "out"
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    run_study(made / "study.toml", progress=False)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    changed = declare(made, "changed.toml", decompose=f"{{classes = {CLASSES}, k = 9}}")
    with pytest.raises(ValueError, match="k: stored 8, now 9"):
        run_study(changed, progress=False)


def test_a_model_that_cannot_be_perturbed_stops_the_study_before_it_writes(made: Path) -> None:
    from tests.model_samples import tiny_gpt2

    folder = made / "headless"
    tiny_gpt2(head=False, vocab_size=VOCABULARY, n_positions=8).model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    study = declare(made, "short_context.toml", output='"never"', models='["tiny", "headless"]')
    with pytest.raises(ValueError, match="length=16: headless reads at most 8 tokens"):
        run_study(study, progress=False)
    assert not (made / "never").exists()


def test_forced_and_observed_are_means_over_the_same_tokens(made: Path) -> None:
    table = pd.read_csv(made / "out" / "table.csv")
    geometry = open_study(made / "out" / "study.zarr")["tiny/geometry"].to_dataset()
    one = geometry.sel(function_class="mean", layer=1).isel(model=0)
    below = (one.relative_error < 1).values
    assert 0 < below.sum() < one.n  # some tokens have no forced value
    row = table[(table.model == "tiny") & (table.function_class == "mean")].iloc[0]
    observed = one.cos_update_tokenwise.values[below].mean()
    assert row["cos_update_tokenwise"] == pytest.approx(observed, rel=1e-5)
    assert row["n_error_above_one"] == int(one.n) - below.sum()


def test_lost_table_is_made_again_from_the_store(made: Path) -> None:
    shutil.copytree(made / "out", made / "copy")
    shutil.rmtree(made / "copy" / "figures")
    study = declare(made, "copy.toml", output='"copy"')
    run_study(study, progress=False)
    a, b = (pd.read_csv(made / place / "table.csv") for place in ("out", "copy"))
    pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"colour": '"red"'}, "unknown key 'colour'; accepted are models, corpus"),
        ({"decompose": "{kk = 3}"}, "unknown key 'decompose.kk'; accepted are classes, k"),
        ({"decompose": "{k = 5000}"}, "k = 5000 is larger than the reference set"),
        ({"decompose": '{k = "many"}'}, "decompose.k: .*given 'many'"),
        ({"decompose": '{classes = ["spline"]}'}, "spline"),
        ({"corpus": '"missing.txt"'}, "corpus: there is no missing.txt"),
        ({"models": '["./nothing"]'}, "models: there is no ./nothing"),
        ({"models": '["tiny", "./tiny"]'}, "two models would be stored as 'tiny'"),
        ({"models": ""}, "models: Field required"),
        ({"windows": "{reference = 3}"}, "both reference and evaluation"),
        ({"perturb": '{function_class = ["linear"]}'}, "not among decompose.classes"),
        ({"perturb": '{positions = ["some"]}'}, "perturb.positions"),
        ({"output": "3"}, "output: .*string"),
        ({"models": "3"}, "models: accepted are a name or path"),
        ({"models": '[{path = "tiny", name = "statistics"}]'}, "models: .*'statistics'"),
        ({"perturb": '{positions = ["all", "all"]}'}, "perturb.positions: .*each once"),
        ({"perturb": "{controls = []}"}, "perturb.controls: at least one"),
        ({"perturb": "{seed = -1}"}, "perturb.seed: .*greater than or equal to 0"),
        ({"decompose": "{ridge = nan}"}, "decompose.ridge: a ridge is finite"),
        ({"separator": '"("'}, "separator: no regular expression"),
        ({"device": '"foo"'}, "device"),
        ({"output": '"text.jsonl"'}, "output: text.jsonl is a file"),
    ],
)
def test_wrong_declarations_are_one_line_exit_two_and_write_nothing(made, changes, match) -> None:
    study = declare(made, "wrong.toml", **{"output": '"never"', **changes})
    import re

    with pytest.raises(StudyError, match=match):
        run_study(study, progress=False)
    result = CliRunner().invoke(app, ["run", str(study)])
    assert result.exit_code != 0
    assert re.search(match, str(result.exception))
    assert not (made / "never").exists()


def test_text_too_short_for_k_writes_nothing(made: Path) -> None:
    study = declare(
        made, "short.toml", output='"never"', windows="{length = 16}",
        decompose=f"{{classes = {CLASSES}, k = 4000}}",
    )  # fmt: skip
    with pytest.raises(StudyError, match="k = 4000 is larger than the reference set of"):
        run_study(study, progress=False)
    assert not (made / "never").exists()


def test_five_lines_are_a_study(made: Path) -> None:
    path = made / "five.toml"
    path.write_text('models = "tiny"\ncorpus = "text.jsonl"\noutput = "five"\n', encoding="utf-8")
    config = read_study(path)
    assert config.perturbed == config.decompose.classes
    assert config.models[0].path == str(made / "tiny")


def test_dry_run_says_what_and_writes_nothing(made: Path) -> None:
    study = declare(made, "dry.toml", output='"never"')
    result = CliRunner().invoke(app, ["run", str(study), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "To do:" in result.output and "perturbation" in result.output
    assert not (made / "never").exists()


def test_verbs_as_commands_do_what_the_study_does(made: Path) -> None:
    runner, store = CliRunner(), made / "by_hand.zarr"

    def call(*words: str) -> str:
        result = runner.invoke(app, [*words, "--store", str(store)])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    call(
        "extract", str(made / "tiny"), str(made / "text.jsonl"), "--length", "16",
        "--reference", "20", "--evaluation", "12", "-q",
    )  # fmt: skip
    call("decompose", "--classes", "mean; affine", "--k", "8", "-q")
    call("geometry", "-q")
    call("perturb", str(made / "tiny"), "--function-class", "mean;affine", "--layers", "1,3", "-q")
    out = made / "correlations.csv"
    shown = call("correlate", "kl ~ relative_error", "--n-boot", "100", "--out", str(out))
    assert "Spearman correlation of kl ~ relative_error" in shown
    frame = pd.read_csv(out)
    assert len(frame) == 2 * 2 * 2  # classes x positions x layers
    wrong = runner.invoke(app, ["geometry", "--store", str(store), "--model", "none"])
    assert wrong.exit_code != 0 and "no model none" in str(wrong.exception)


def test_every_command_has_help_with_an_example() -> None:
    runner = CliRunner()
    for command in (
        "run",
        "extract",
        "decompose",
        "geometry",
        "perturb",
        "correlate",
        "report",
        "verify",
    ):
        result = runner.invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert "Example: " in result.output and f"geomstats-lm {command}" in result.output
