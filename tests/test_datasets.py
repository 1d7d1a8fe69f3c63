"""Example models and text: found in a checkout and in a wheel, refused by reason elsewhere."""

from __future__ import annotations

import json
import shutil

import pytest

from geomstats_lm import datasets


def test_the_two_models_of_the_wheel_are_available_in_a_checkout():
    names = datasets.available_models()
    assert names[:2] == ["gpt2", "mamba2"]
    assert set(names) <= set(datasets.MODELS)


def test_every_folder_of_weights_is_a_known_model():
    folders = {path.parent.name for path in (datasets.CHECKOUT / "models").glob("*/config.json")}
    assert folders == set(datasets.available_models())


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"name='gpt5'.*gpt2, mamba2"):
        datasets.example_path("gpt5")


def test_a_model_that_a_wheel_leaves_out_says_where_it_is(tmp_path, monkeypatch):
    shutil.copytree(datasets.CHECKOUT / "models" / "gpt2", tmp_path / "models" / "gpt2")
    monkeypatch.setattr(datasets, "PACKAGED", tmp_path)
    assert datasets.available_models() == ["gpt2"]
    assert datasets.example_path("gpt2").parent == tmp_path / "models"
    with pytest.raises(FileNotFoundError, match=r"it has: gpt2.*data/models/gpt2-step50.*gpt2`"):
        datasets.example_path("gpt2-step50")
    with pytest.raises(FileNotFoundError, match="no example text"):
        datasets.example_corpus()


def test_load_example_gives_the_model_and_its_untrained_twin():
    model = datasets.load_example("gpt2")
    card = json.loads((datasets.example_path("gpt2") / "card.json").read_text())
    assert sum(p.numel() for p in model.model.parameters()) == card["parameters"]
    twin = datasets.load_example("gpt2", untrained=True, seed=1)
    weights = dict(model.model.named_parameters())
    drawn = dict(twin.model.named_parameters())
    assert weights.keys() == drawn.keys()
    assert not (weights["transformer.wte.weight"] == drawn["transformer.wte.weight"]).all()


def test_example_corpus_holds_many_documents_of_every_source():
    corpus = datasets.example_corpus()
    assert len(corpus) >= 40
    assert corpus["text"].str.len().between(1_500, 9_000).all()
    path = datasets.CHECKOUT / "text" / "heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {row["source"] for row in rows} == {"sotu", "shakespeare", "bible"}
    assert len({row["title"] for row in rows}) == len(rows)
    assert list(corpus["text"]) == [row["text"] for row in rows]
