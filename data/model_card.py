"""How good is a trained model on documents it never saw, its weights rounded to 16 bits?

    bits per byte = sum of -log2 p(token) over the held-out documents / their bytes in UTF-8

`python data/model_card.py gpt2` writes the weights of the last checkpoint, loads them back,
measures them beside a trigram model and gzip on the same documents, and writes `data/models/gpt2/`
with `card.json` for programs and `README.md` for people. `--step 200` does it for a kept step.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import kneser_ney
import numpy as np
import torch
import transformers
from architectures import ARCHITECTURES, CONTEXT, build
from encode_text import VOCABULARY, Tokens, encode, encoded_documents
from fetch_text import PACKAGES, ROOT, Document, cut, is_long, training_and_heldout
from train_models import MODELS, RUNS, document_losses, write_curve

BASELINES = ROOT / "data" / "text" / "baselines.json"
WEIGHTS = "model.safetensors"


def finish(name: str, step: int | None = None, note: str = "") -> dict[str, Any]:
    """Write a model's folder from its last checkpoint, or from a kept step; return the card."""
    state = torch.load(RUNS / f"{name}.pt", weights_only=False)
    weights = state["model"]
    if step is not None:
        weights = torch.load(RUNS / f"{name}-step{step}.pt", weights_only=True)
    curve = [row for row in state["curve"] if row["step"] <= (step or state["step"])]
    model = build(name, state["seed"])
    model.load_state_dict(weights)
    folder = MODELS / (name if step is None else f"{name}-step{step}")
    training, heldout, sample, tokenizer = encoded_documents()
    model.config.use_cache = True
    model.half().save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)
    tokenizer.save_pretrained(folder)
    write_curve(curve, folder / "learning_curve.csv")
    # From here on the files are measured, not the model in memory.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = transformers.AutoTokenizer.from_pretrained(folder)
    if any(not np.array_equal(encode(seen, d["text"]), t) for d, t in zip(sample, heldout)):
        raise ValueError(f"the tokenizer saved in {folder} does not give the tokens trained on")
    losses = document_losses(loaded, heldout, seen.eos_token_id)
    some_training = [encode(seen, d["text"]) for d in _some_training()]
    train_losses = document_losses(loaded, some_training, seen.eos_token_id)
    card = _card(folder.name, loaded, state, curve, losses, np.concatenate(train_losses))
    card |= _beside_baselines(sample, losses, training, heldout, seen.eos_token_id)
    card["sha256"] = {WEIGHTS: sha256(folder / WEIGHTS)}
    card["note"] = note
    options = [f"--{key} {state[key]}" for key in ("tokens", "batch", "seed")]
    options += ["--compile"] if state["compiled"] else []
    options += [f"--keep {step}"] if step is not None else []
    card["command"] = f"python data/train_models.py {name} {' '.join(options)}"
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (folder / "README.md").write_text(_readme(card))
    return card


def sha256(path: Path) -> str:
    """Return a file's SHA-256 as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bits_per_byte(nats: float, documents: list[Document]) -> float:
    """Convert a sum of losses in nats to bits per byte of the documents' text."""
    return float(nats / np.log(2)) / sum(len(d["text"].encode()) for d in documents)


def _some_training() -> list[Document]:
    """Return training documents cut and mixed as the evaluation sample is, drawn by seed."""
    training, _ = training_and_heldout()
    generator = np.random.default_rng(0)
    drawn: list[Document] = []
    for source, number in {"sotu": 27, "shakespeare": 24, "bible": 28}.items():
        long = [d for d in training if d["source"] == source and is_long(d)]
        drawn += [long[i] for i in generator.choice(len(long), number, replace=False)]
    return [{**d, "text": cut(d["text"])} for d in drawn]


def _card(
    name: str,
    model: transformers.PreTrainedModel,
    state: dict[str, Any],
    curve: list[dict[str, float]],
    losses: Tokens,
    train_losses: np.ndarray,
) -> dict[str, Any]:
    training, _, _, _ = encoded_documents()
    config = model.config
    tokens_seen = int(curve[-1]["tokens"])
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": CONTEXT,
        "weights_dtype": "float16",
        "seed": state["seed"],
        "products": state.get("products", "bfloat16"),
        "steps": int(curve[-1]["step"]),
        "batch": f"{state['batch']} x {CONTEXT}",
        "tokens_seen": tokens_seen,
        "epochs": tokens_seen / sum(len(tokens) for tokens in training),
        "train_loss": float(train_losses.mean()),
        "train_loss_tokens": len(train_losses),
        "heldout_loss": float(np.concatenate(losses).mean()),
        "heldout_tokens": sum(len(part) for part in losses),
        "heldout_documents": len(losses),
    }


def _beside_baselines(
    sample: list[Document], losses: Tokens, training: Tokens, heldout: Tokens, boundary: int
) -> dict[str, Any]:
    trigram = baselines(sample, training, heldout, boundary)
    difference = np.array([part.mean() for part in losses]) - trigram["trigram_by_document"]
    by_source = {}
    for source in PACKAGES:
        parts = [part for d, part in zip(sample, losses) if d["source"] == source]
        by_source[source] = {
            "heldout_loss": float(np.concatenate(parts).mean()),
            "trigram_loss": trigram["trigram_by_source"][source],
        }
    return {
        "heldout_bits_per_byte": bits_per_byte(float(np.concatenate(losses).sum()), sample),
        "trigram_loss": trigram["trigram_loss"],
        "trigram_bits_per_byte": trigram["trigram_bits_per_byte"],
        "gzip_bits_per_byte": trigram["gzip_bits_per_byte"],
        "documents_better_than_trigram": int((difference < 0).sum()),
        "gain_over_trigram": float(-difference.mean()),
        "gain_std_error": float(difference.std(ddof=1) / np.sqrt(len(difference))),
        "by_source": by_source,
    }


def baselines(
    sample: list[Document], training: Tokens, heldout: Tokens, boundary: int
) -> dict[str, Any]:
    """Return the trigram's and gzip's figures on the evaluation sample, computed once."""
    if BASELINES.exists():
        return json.loads(BASELINES.read_text())
    model = kneser_ney.fit(training, VOCABULARY, boundary)
    losses = [kneser_ney.losses(model, document) for document in heldout]
    text = "\n".join(document["text"] for document in sample).encode()
    by_source = {
        source: float(
            np.concatenate([p for d, p in zip(sample, losses) if d["source"] == source]).mean()
        )
        for source in PACKAGES
    }
    result = {
        "trigram_loss": float(np.concatenate(losses).mean()),
        "trigram_bits_per_byte": bits_per_byte(float(np.concatenate(losses).sum()), sample),
        "gzip_bits_per_byte": 8 * len(gzip.compress(text, 9)) / len(text),
        "trigram_training_tokens": sum(len(tokens) for tokens in training),
        "trigram_by_source": by_source,
        "trigram_by_document": [float(part.mean()) for part in losses],
    }
    BASELINES.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _readme(card: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {source} | {figures['heldout_loss']:.3f} | {figures['trigram_loss']:.3f} |"
        for source, figures in card["by_source"].items()
    )
    note = f"\n{card['note']}\n" if card["note"] else ""
    stage = ""
    if "-step" in card["name"]:
        stage = " This is its state on the way, before the step size fell."
    return f"""# {card["name"]}

A small {card["architecture"]} trained from nothing on public-domain English, to have real weights
to study; it writes no useful text.{stage}

| | |
|---|---|
| parameters | {card["parameters"]:,} ({card["layers"]} blocks x {card["hidden_size"]} dims, \
vocabulary {card["vocabulary"]}, embedding tied to the output) |
| tokens seen | {card["tokens_seen"]:,} in {card["steps"]:,} steps of {card["batch"]} tokens, \
{card["epochs"]:.2f} epochs of the training text |
| training loss | {card["train_loss"]:.4f} nats per token, on {card["train_loss_tokens"]:,} tokens \
of training documents, cut and mixed alike |
| held-out loss | {card["heldout_loss"]:.4f} nats per token, on {card["heldout_tokens"]:,} tokens \
of {card["heldout_documents"]} documents |
| weights | safetensors, {card["weights_dtype"]}; all losses are those of the rounded weights, \
computed in float32 |

## Beside simpler models, on the same held-out documents

| | nats per token | bits per byte |
|---|---|---|
| this model | {card["heldout_loss"]:.3f} | {card["heldout_bits_per_byte"]:.3f} |
| trigram, interpolated modified Kneser-Ney, same tokens, all training documents | \
{card["trigram_loss"]:.3f} | {card["trigram_bits_per_byte"]:.3f} |
| gzip -9 on all of it | | {card["gzip_bits_per_byte"]:.3f} |

The gain over the trigram is {card["gain_over_trigram"]:.3f} nats per token (mean over documents; \
standard error {card["gain_std_error"]:.3f}); the model is better in \
{card["documents_better_than_trigram"]} of {card["heldout_documents"]} documents.

| source | this model | trigram |
|---|---|---|
{rows}

The held-out documents are `data/text/heldout.jsonl`. Each starts after one `<|endoftext|>`; windows
of {card["context"]} tokens follow one another without overlap, so that every token is predicted
once, from at most {card["context"]} tokens of its own document. The trigram always sees two.

## How it was made

    {card["command"]}
    python data/model_card.py {card["name"].replace("-step", " --step ")}

Seed {card["seed"]}, one thread, {card["products"]} matrix products, Muon for matrices inside the
blocks and AdamW for the rest, step size to zero over the second half. `learning_curve.csv` holds
the course of it: its training loss is a running mean over batches, its held-out loss that of every
fourth held-out document. Threads and versions move the last digits; a new run is as good, not the
same.
{note}
Text: State of the Union addresses (public domain), Shakespeare and Milton (CC BY 2.5, Open
Knowledge Foundation), the King James Bible (public domain); see `data/README.md`. Weights: MIT, as
the package.

sha256 of `{WEIGHTS}`: `{card["sha256"][WEIGHTS]}`
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained model's folder and card.")
    parser.add_argument("model", choices=list(ARCHITECTURES))
    parser.add_argument("--step", type=int, help="a step kept by train_models.py --keep")
    parser.add_argument("--note", default="", help="what the command does not say of the run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    card = finish(arguments.model, arguments.step, arguments.note)
    keys = ["heldout_loss", "heldout_bits_per_byte", "trigram_bits_per_byte", "gain_over_trigram"]
    print(arguments.model, {key: round(card[key], 4) for key in keys})


if __name__ == "__main__":
    main()
