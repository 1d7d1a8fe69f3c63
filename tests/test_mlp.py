"""The network class: recovery, determinism, honesty about convergence."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from geomstats_lm import mlp
from geomstats_lm.decompose import decompose
from tests.synthetic import activations


def sample(n=3000, d=6, seed=0):
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, d)).astype(np.float32) * 2 + 1
    first, second = rng.normal(size=(d, 8)), rng.normal(size=(8, d))
    targets = np.tanh((states - 1) @ first) @ second + 5
    return states, targets.astype(np.float32), np.arange(n) // 50


@pytest.mark.filterwarnings("ignore:mlp with")
def test_a_planted_network_is_learned_where_an_affine_map_fails():
    states, targets, documents = sample()
    fitted = mlp.fit(
        states[:2500], targets[:2500], documents[:2500], hidden=32, seed=0, most_steps=1000
    )
    left = targets[2500:] - mlp.predict(fitted, states[2500:])
    augmented = np.c_[states, np.ones(len(states))]
    slope = np.linalg.lstsq(augmented[:2500], targets[:2500], rcond=None)[0]
    affine = targets[2500:] - augmented[2500:] @ slope
    # measured .31 of the affine map's squared error; half leaves room for other seeds
    assert np.sum(left**2) < 0.5 * np.sum(affine**2)
    assert fitted.history.min() < 0.5 * fitted.history[0]


@pytest.mark.filterwarnings("ignore:mlp with")
def test_the_same_seed_gives_the_same_network_in_any_thread_and_no_other():
    states, targets, documents = sample(n=400)
    arguments = states, targets, documents
    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(mlp.fit, *arguments, hidden=8, seed=s, most_steps=100) for s in (0, 0, 1)
        ]
        networks = [job.result() for job in jobs]
    one, two, three = ([*n.weights] for n in networks)
    assert all(np.array_equal(a, b) for a, b in zip(one, two))
    assert not all(np.array_equal(a, b) for a, b in zip(one, three))
    assert torch.equal(before, torch.random.get_rng_state())


def test_training_cut_short_says_so():
    states, targets, documents = sample(n=600)
    with pytest.warns(UserWarning, match="has not converged"):
        fitted = mlp.fit(states, targets, documents, hidden=8, seed=0, most_steps=18)
    assert not fitted.converged and fitted.epochs == 9  # of two batches each


def test_one_document_cannot_stop_early():
    states, targets, _ = sample(n=50)
    with pytest.raises(ValueError, match="at least 2 documents"):
        mlp.fit(states, targets, np.zeros(50), hidden=4, seed=0)


@pytest.mark.filterwarnings("ignore:mlp with")
def test_it_is_a_class_like_any_other(monkeypatch):
    data = activations(n_layers=1, documents=12)
    monkeypatch.setattr(mlp, "MOST_STEPS", 300)
    parts = decompose(data, ["mlp[hidden=16]", "mean"], k=8).compute()
    size = np.sum(parts["residual"].values[0, :, 0] ** 2, (1, 2))
    assert size[0] < size[1]
    assert parts["converged"].dtype == bool
    again = decompose(data, ["mlp[hidden=16]"], k=8).compute()
    assert np.array_equal(again["tokenwise"][:, 0], parts["tokenwise"][:, 0])
    inside = decompose(data, ["mlp[hidden=16]"], k=8, tokens="reference").compute()
    assert np.isfinite(inside["tokenwise"]).all()
