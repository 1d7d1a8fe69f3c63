"""How are the example models trained, from nothing and on one core?

    loss = -mean log p(x_{t+1} | x_1 .. x_t)
    step size = peak * min(1, t / warm-up, 2 (1 - t / T))

`python data/train_models.py gpt2` trains one model and resumes where it was stopped. Matrices
inside the blocks are moved by Muon, all other parameters by AdamW. The step size rises, stays, and
falls to zero over the second half of the budget, so a run may be given another budget (`--tokens`)
while it is resumed before the fall.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import ARCHITECTURES, CONTEXT, build
from encode_text import Tokens, encoded_documents
from fetch_text import ROOT
from rwkv_scan import compiled_scan
from tqdm import tqdm

MODELS = ROOT / "data" / "models"
RUNS = ROOT / ".cache" / "training"
MUON_PEAK, ADAM_PEAK, WARM_UP, WEIGHT_DECAY = 0.02, 3e-3, 60, 0.1
SAVE_EVERY_SECONDS = 120.0
# A CPU without bfloat16 arithmetic emulates it some ten times slower than it computes in float32.
HALF = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
EVALUATE_EVERY = 200  # steps


@dataclass
class Run:
    """A training run: the model, its two optimizers, the step reached and the curve so far."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    peaks: list[float]
    step: int
    curve: list[dict[str, float]]


def train(
    name: str, tokens: int, *, size: int, seed: int, compiled: bool, kept_steps: list[int]
) -> Run:
    """Train one architecture on `tokens` tokens, `size` windows a step; return the finished run."""
    training, heldout, _, tokenizer = encoded_documents()
    stream = np.concatenate([np.concatenate([[tokenizer.eos_token_id], d]) for d in training])
    sample = heldout[::4]  # for the curve; the card is about all of them
    run = _start_or_resume(name, seed)
    steps = tokens // (size * CONTEXT)
    settings = {
        "tokens": tokens, "batch": size, "seed": seed, "compiled": compiled,
        "products": "bfloat16" if HALF else "float32",
    }  # fmt: skip
    loss_of = torch.compile(batch_loss) if compiled else batch_loss
    smooth, saved = float("nan"), time.monotonic()
    with tqdm(total=steps, initial=run.step, desc=name, mininterval=10, unit="step") as bar:
        while run.step < steps:
            windows = torch.from_numpy(batch(stream, run.step, size, seed))
            for optimizer, peak in zip(run.optimizers, run.peaks):
                for group in optimizer.param_groups:
                    group["lr"] = peak * schedule(run.step, steps)
            run.model.train()
            loss = loss_of(run.model, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.step += 1
            smooth = loss.item() if np.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
            bar.update()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            if run.step % EVALUATE_EVERY == 0 or run.step == steps or run.step in kept_steps:
                held = heldout_loss(run.model, sample, tokenizer.eos_token_id)
                row = {"step": run.step, "tokens": run.step * size * CONTEXT}
                run.curve.append({**row, "train_loss": smooth, "heldout_loss": held})
                tqdm.write(f"{name} step {run.step} train {smooth:.4f} held-out {held:.4f}")
            if run.step in kept_steps:
                torch.save(run.model.state_dict(), RUNS / f"{name}-step{run.step}.pt")
            if time.monotonic() - saved > SAVE_EVERY_SECONDS or run.step == steps:
                _save(run, name, settings)
                saved = time.monotonic()
    return run


def orthogonalize(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return Muon's direction, ``X <- a X + (b XX' + c (XX')^2) X`` from X = G/|G|, in float32."""
    a, b, c = coefficients
    wide = gradient.shape[0] <= gradient.shape[1]
    x = gradient if wide else gradient.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak step size: a rise, a plateau, a linear fall to zero."""
    return min(1.0, (step + 1) / WARM_UP, 2.0 * (1.0 - step / steps))


def batch_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each token of the windows but the first."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=HALF):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def batch(stream: np.ndarray, step: int, size: int, seed: int) -> np.ndarray:
    """Return step's windows, (size, CONTEXT + 1): each epoch cuts and shuffles the text anew."""
    per_epoch = (len(stream) - CONTEXT - 1) // (size * CONTEXT)
    epoch, place = divmod(step, per_epoch)
    generator = np.random.default_rng([seed, epoch])
    offset = generator.integers(CONTEXT)
    order = generator.permutation((len(stream) - 1 - offset) // CONTEXT)
    starts = offset + CONTEXT * order[place * size : (place + 1) * size]
    return stream[starts[:, None] + np.arange(CONTEXT + 1)]


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, documents: Tokens, boundary: int) -> float:
    """Return the mean loss in nats per token, every token of every document predicted once.

    Windows of CONTEXT tokens follow one another without overlap; the first of a document begins
    with the boundary token, any other with the last token of the window before it.
    """
    return float(np.concatenate(document_losses(model, documents, boundary)).mean())


@torch.no_grad()
def document_losses(model: torch.nn.Module, documents: Tokens, boundary: int) -> Tokens:
    """Return the loss of each token of each document, in nats."""
    model.eval()
    losses = []
    for document in documents:
        ids = torch.from_numpy(np.concatenate([[boundary], document]))
        parts = []
        for start in range(0, len(document), CONTEXT):
            window = ids[start : start + CONTEXT + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            parts.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
        losses.append(torch.cat(parts).numpy())
    return losses


def _start_or_resume(name: str, seed: int) -> Run:
    model = build(name, seed)
    matrices, others = [], []
    for label, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and "embed" not in label and ".wte" not in label
        inside = inside and ".wpe" not in label and "lm_head" not in label
        if inside:
            matrices.append(parameter)
        else:
            others.append((label, parameter))
    # A mixing ratio, one number per channel, is a matrix in shape alone.
    decayed = [p for label, p in others if p.ndim > 1 and "time_mix" not in label]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {
            "params": [p for label, p in others if p.ndim <= 1 or "time_mix" in label],
            "weight_decay": 0.0,
        },
    ]
    if not HALF:  # torch's own is the same iteration in bfloat16, without a switch
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalize
    # Four Newton-Schulz steps instead of five: on one core they are a fifth of the time.
    muon = torch.optim.Muon(
        matrices, lr=MUON_PEAK, momentum=0.95, weight_decay=WEIGHT_DECAY, ns_steps=4
    )
    adam = torch.optim.AdamW(groups, lr=ADAM_PEAK, betas=(0.9, 0.95))
    run = Run(model, [muon, adam], [MUON_PEAK, ADAM_PEAK], 0, [])
    path = RUNS / f"{name}.pt"
    if path.exists():
        state = torch.load(path, weights_only=False)
        if state["seed"] != seed:
            raise ValueError(f"seed={seed}, but {path} was started with seed {state['seed']}")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        run.step, run.curve = state["step"], state["curve"]
    return run


def _save(run: Run, name: str, settings: dict[str, Any]) -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    state = {
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "step": run.step,
        "curve": run.curve,
        **settings,
    }
    partial = RUNS / f"{name}.partial"
    torch.save(state, partial)
    partial.replace(RUNS / f"{name}.pt")


def write_curve(curve: list[dict[str, float]], path: Path) -> None:
    """Write the learning curve as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one example model, or go on with it.")
    parser.add_argument("model", choices=list(ARCHITECTURES))
    parser.add_argument("--tokens", type=int, default=6_000_000, help="tokens seen in all")
    parser.add_argument("--batch", type=int, default=6, help="windows of 256 tokens per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; faster")
    parser.add_argument("--keep", type=int, nargs="*", default=[], help="steps whose weights stay")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    # RWKV's own loop over tokens is too slow to train; the models of others need no replacement.
    with compiled_scan():
        train(
            arguments.model,
            arguments.tokens,
            size=arguments.batch,
            seed=arguments.seed,
            compiled=arguments.compile,
            kept_steps=arguments.keep,
        )


if __name__ == "__main__":
    main()
