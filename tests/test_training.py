"""Training resumes to the same weights, reads every token, and RWKV's scan is the library's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))

import architectures
import fetch_text
import rwkv_scan
import train_models
from transformers.models.rwkv import modeling_rwkv


class _Tokenizer:
    eos_token_id = 0


@pytest.fixture
def small_text(tmp_path, monkeypatch):
    """Two training documents and one held-out one; checkpoints in a folder of the test's own."""
    generator = np.random.default_rng(0)
    training = [generator.integers(1, 60, size) for size in (2_000, 1_500)]
    documents = training, [generator.integers(1, 60, 300)], [], _Tokenizer()
    monkeypatch.setattr(train_models, "encoded_documents", lambda: documents)
    monkeypatch.setattr(train_models, "RUNS", tmp_path)
    return training


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(small_text, monkeypatch):
    settings = {"size": 1, "seed": 3, "compiled": False, "kept_steps": []}
    monkeypatch.setattr(train_models, "WARM_UP", 2)
    whole = train_models.train("gpt2", 6 * 256, **settings)
    (train_models.RUNS / "gpt2.pt").unlink()
    # The rate depends on the whole budget: a run is stopped by time, not by another budget.
    monkeypatch.setattr(train_models, "SAVE_EVERY_SECONDS", -1.0)
    saved = train_models._save

    def stop_after_three(run, name, of):
        saved(run, name, of)
        if run.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_models, "_save", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        train_models.train("gpt2", 6 * 256, **settings)
    monkeypatch.setattr(train_models, "_save", saved)
    resumed = train_models.train("gpt2", 6 * 256, **settings)
    assert resumed.step == whole.step == 6
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters()):
        torch.testing.assert_close(one, other, msg=name, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_refuses_another_seed(small_text):
    settings = {"size": 1, "compiled": False, "kept_steps": []}
    train_models.train("gpt2", 256, seed=0, **settings)
    with pytest.raises(ValueError, match="seed=1, but .* was started with seed 0"):
        train_models.train("gpt2", 512, seed=1, **settings)


def test_batches_of_an_epoch_hold_every_window_once_and_differ_between_epochs():
    stream = np.arange(256 * 9 + 300)
    steps = (len(stream) - 257) // (2 * 256)
    epoch = np.concatenate([train_models.batch(stream, step, 2, seed=0) for step in range(steps)])
    starts = epoch[:, 0]
    assert epoch.shape == (2 * steps, 257)
    assert len(set(starts)) == len(starts)
    assert len(set(starts % 256)) == 1  # windows follow one another without overlap
    np.testing.assert_array_equal(epoch, starts[:, None] + np.arange(257))
    again = train_models.batch(stream, 0, 2, seed=0)
    np.testing.assert_array_equal(again, epoch[:2])
    assert not np.array_equal(train_models.batch(stream, steps, 2, seed=0), again)


def test_step_size_rises_stays_and_falls_to_zero():
    shares = [train_models.schedule(step, 1_000) for step in range(1_000)]
    assert shares[0] == pytest.approx(1 / train_models.WARM_UP)
    assert shares[train_models.WARM_UP] == shares[500] == 1.0
    assert shares[750] == pytest.approx(0.5)
    assert shares[-1] == pytest.approx(0.002)


def test_held_out_loss_predicts_every_token_once():
    class Uniform(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            class Output:
                logits = torch.zeros(*input_ids.shape, 16)

            return Output

    documents = [np.arange(600) % 16, np.arange(256) % 16, np.array([3])]
    losses = train_models.document_losses(Uniform(), documents, boundary=0)
    assert [len(part) for part in losses] == [600, 256, 1]
    assert train_models.heldout_loss(Uniform(), documents, 0) == pytest.approx(np.log(16))


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_architecture_has_the_matched_size_and_learns(name):
    model = architectures.build(name, seed=0)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 5e6
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (6, 192)
    windows = torch.randint(0, 4096, (2, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with rwkv_scan.compiled_scan():
        losses = []
        for _ in range(4):
            loss = train_models.batch_loss(model, windows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


def test_build_depends_on_the_seed_alone_and_refuses_an_unknown_name():
    torch.manual_seed(5)
    one = architectures.build("llama", seed=1).state_dict()
    torch.manual_seed(6)
    two = architectures.build("llama", seed=1).state_dict()
    other = architectures.build("llama", seed=2).state_dict()
    key = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[key], two[key])
    assert not torch.equal(one[key], other[key])
    with pytest.raises(ValueError, match="'gpt4' is not known; known are gpt2"):
        architectures.build("gpt4", seed=0)


def test_compiled_scan_has_the_values_and_gradients_of_the_library():
    generator = torch.Generator().manual_seed(0)
    shapes = [(24,), (24,), (3, 40, 24), (3, 40, 24)]
    inputs = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    # Keys far from zero: the library keeps a running maximum, the scan one maximum a channel.
    with torch.no_grad():
        inputs[2].mul_(8).add_(30)
    stock, _ = modeling_rwkv.rwkv_linear_attention(*inputs)
    scan, _ = rwkv_scan.linear_attention(*inputs)
    upstream = torch.randn(stock.shape, generator=generator)
    expected = torch.autograd.grad((stock * upstream).sum(), inputs)
    found = torch.autograd.grad((scan * upstream).sum(), inputs)
    # The library takes exponentials of keys of size 30 in float32: about 30 * 6e-8 each.
    torch.testing.assert_close(scan, stock, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, expected):
        # float32 sums over 40 tokens on the library's side
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_compiled_scan_is_taken_back_after_an_error_and_refuses_states():
    stock = modeling_rwkv.rwkv_linear_attention
    with pytest.raises(RuntimeError, match="stop"), rwkv_scan.compiled_scan():
        assert modeling_rwkv.rwkv_linear_attention is rwkv_scan.linear_attention
        raise RuntimeError("stop")
    assert modeling_rwkv.rwkv_linear_attention is stock
    tensors = torch.zeros(4), torch.zeros(4), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="state"):
        rwkv_scan.linear_attention(*tensors, return_state=True)


def test_held_out_documents_are_long_and_cut_at_a_line_or_sentence():
    long = "A sentence of words. " * 1_000
    assert fetch_text.cut("short") == "short"
    cut = fetch_text.cut(long)
    assert len(cut.encode()) <= fetch_text.LONGEST
    assert cut.endswith("words.")
    documents = [
        {"source": "bible", "work": "Ruth", "title": str(i), "text": text}
        for i, text in enumerate(["too short", *["x" * 3_000] * 9])
    ]
    sample = fetch_text.evaluation_sample(documents)
    assert len(sample) == fetch_text.PER_WORK
    assert sample[0]["title"] == "1"
    assert sample[-1]["title"] == "9"
