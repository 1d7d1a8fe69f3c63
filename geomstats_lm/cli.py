"""How does one run the verbs from a shell?  ``geomstats-lm VERB --help`` shows each.

A wrong argument is one clear line on standard error and exit code 2, with nothing written.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Statistics for language-model internals: how much of every layer's update a tokenwise "
    "map explains, the geometry of what it misses, and the damage that does to the output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[Path, typer.Option(help="Zarr store of the study.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Redo what was made with other settings.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Key = Annotated[
    list[str] | None, typer.Option("--model", help="Model key in the store; all by default.")
]


@app.command()
def run(
    study: Annotated[Path, typer.Argument(help="TOML file that declares the study.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be computed, and stop.")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Run a declared study: every verb in order, table and figures at the end.

    Example: [bold]geomstats-lm run analyses/quickstart.toml[/bold]
    """
    from geomstats_lm.declaration import read_study
    from geomstats_lm.study import OUTPUTS, is_finished, run_study

    config = read_study(study)
    if dry_run:
        from geomstats_lm.plan import plan_study, print_plan

        print_plan(plan_study(config))
        return
    if is_finished(config):
        typer.echo("Everything is done already; here is what was found.")
    output = run_study(config, overwrite=overwrite, progress=not quiet)
    import pandas as pd

    from geomstats_lm.report import print_table

    print_table(pd.read_csv(output / "table.csv"))
    names = ", ".join(("study.zarr", *OUTPUTS))
    typer.echo(f"Written to {output}: {names}")


@app.command()
def extract(
    model: Annotated[str, typer.Argument(help="Hub id, folder or GGUF file.")],
    corpus: Annotated[list[Path], typer.Argument(help="Text files, JSON lines or folders.")],
    store: Store,
    name: Annotated[str | None, typer.Option(help="Name to keep the model under.")] = None,
    separator: Annotated[
        str | None, typer.Option(help="Regular expression between documents, or 'wikitext'.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 128,
    reference: Annotated[int | None, typer.Option(help="Reference windows.")] = None,
    evaluation: Annotated[int | None, typer.Option(help="Evaluation windows.")] = None,
    seed: int = 0,
    dtype: Annotated[str, typer.Option(help="Storage: float32, float16 or bfloat16.")] = "float32",
    device: str = "cpu",
    batch_size: int = 16,
    untrained: Annotated[bool, typer.Option("--untrained", help="Fresh weights.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Store a model's states on a text.

    Example: [bold]geomstats-lm extract data/models/gpt2 data/text/heldout.jsonl
    --store study.zarr --reference 96 --evaluation 40[/bold]
    """
    from geomstats_lm import extract as verb
    from geomstats_lm import load_model, read_corpus, windows

    if (reference is None) != (evaluation is None):
        raise ValueError("--reference and --evaluation: give both, or neither")
    n_windows = None if reference is None or evaluation is None else (reference, evaluation)
    text = read_corpus(corpus, separator=separator)
    loaded = load_model(model, name=name, device=device, untrained=untrained, seed=seed)
    cut = windows(text, loaded.tokenizer, length=length, n_windows=n_windows, seed=seed)
    leaf = verb(
        loaded, cut, store, dtype=dtype, batch_size=batch_size, overwrite=overwrite,
        progress=not quiet,
    )  # fmt: skip
    _say(store, loaded.key, "activations", leaf)


@app.command()
def decompose(
    store: Store,
    classes: Annotated[
        str | None, typer.Option(help="Labels, separated by semicolons; the usual ones by default.")
    ] = None,
    k: Annotated[int, typer.Option(help="Neighbours of a local fit.")] = 32,
    ridge: Annotated[
        float | None, typer.Option(help="Ridge of every class; each its own by default.")
    ] = None,
    target: str = "update",
    metric: str = "euclidean",
    model: Key = None,
    device: str = "cpu",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Split every update into a tokenwise part and a residual.

    Example: [bold]geomstats-lm decompose --store study.zarr
    --classes "mean;affine;affine[scope=global]"[/bold]
    """
    from geomstats_lm import decompose as verb

    options: dict[str, Any] = {"k": k, "ridge": ridge, "target": target, "metric": metric}
    if classes is not None:
        options["classes"] = tuple(label.strip() for label in classes.split(";") if label.strip())
    for key, node in _nodes(store, model):
        leaf = verb(
            node, **options, device=device, store=store, overwrite=overwrite, progress=not quiet
        )
        _say(store, key, "decomposition", leaf)


@app.command()
def geometry(
    store: Store, model: Key = None, overwrite: Overwrite = False, quiet: Quiet = False
) -> None:
    """Measure norms, cosines and angles, beside what the residual's size forces.

    Example: [bold]geomstats-lm geometry --store study.zarr[/bold]
    """
    from geomstats_lm import geometry as verb

    for key, node in _nodes(store, model):
        leaf = verb(node, store=store, overwrite=overwrite, progress=not quiet)
        _say(store, key, "geometry", leaf)


@app.command()
def perturb(
    model: Annotated[str, typer.Argument(help="The model that the activations came from.")],
    store: Store,
    name: Annotated[str | None, typer.Option(help="Name it is kept under.")] = None,
    function_class: Annotated[
        str, typer.Option(help="Labels, separated by semicolons.")
    ] = "affine",
    layers: Annotated[
        str | None, typer.Option(help="Layers such as 1,4,6; all by default.")
    ] = None,
    positions: Annotated[str, typer.Option(help="all, single or both.")] = "all,single",
    n_single: Annotated[int, typer.Option(help="Single positions per window.")] = 8,
    controls: Annotated[str, typer.Option(help="exchanged, gaussian, isotropic.")] = "exchanged",
    draws: Annotated[int, typer.Option(help="Draws of each control.")] = 1,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int = 16,
    untrained: Annotated[bool, typer.Option("--untrained", help="Fresh weights.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Replace layers by their tokenwise approximation and measure the damage.

    Example: [bold]geomstats-lm perturb data/models/gpt2 --store study.zarr
    --function-class "affine;mean"[/bold]
    """
    from geomstats_lm import load_model
    from geomstats_lm import perturb as verb

    try:
        chosen = [int(v) for v in layers.split(",")] if layers is not None else None
    except ValueError:
        raise ValueError(f"--layers {layers!r}: accepted are numbers such as 1,4,6") from None
    loaded = load_model(model, name=name, device=device, untrained=untrained, seed=seed)
    for key, node in _nodes(store, [loaded.key]):
        leaf = verb(
            loaded, node, function_class=[c.strip() for c in function_class.split(";")],
            layers=chosen, positions=[p.strip() for p in positions.split(",")],
            n_single=n_single, controls=[c.strip() for c in controls.split(",")], draws=draws,
            seed=seed, batch_size=batch_size, store=store, overwrite=overwrite,
            progress=not quiet,
        )  # fmt: skip
        _say(store, key, "perturbation", leaf)


@app.command()
def correlate(
    store: Store,
    formula: Annotated[str, typer.Argument(help="response ~ predictor")] = "kl ~ residual_norm",
    model: Key = None,
    method: str = "spearman",
    norm: Annotated[str, typer.Option(help="raw, relative or standardized.")] = "raw",
    n_boot: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="CSV file for the tidy table.")] = None,
) -> None:
    """Rank correlations of geometry and damage, with cluster-bootstrap intervals.

    Example: [bold]geomstats-lm correlate "kl ~ relative_error" --store study.zarr
    --out table.csv[/bold]
    """
    import pandas as pd

    from geomstats_lm.report import correlate as verb

    results = []
    for key, node in _nodes(store, model):
        for leaf in ("geometry", "perturbation"):
            if leaf not in node.children:
                raise ValueError(
                    f"--store {store}: {key} has no {leaf} yet; run that command first"
                )
        results.append(
            verb(
                node["geometry"].to_dataset(), node["perturbation"].to_dataset(), formula,
                method=method, norm=norm, n_boot=n_boot, level=level, seed=seed,
            )
        )  # fmt: skip
    for result in results:
        typer.echo(result.summary(rows=200))
    if out is not None:
        pd.concat([r.tidy() for r in results], ignore_index=True).to_csv(out, index=False)
        typer.echo(f"Written to {out}")


@app.command()
def report(
    store: Annotated[Path, typer.Argument(help="Zarr store of the study.")],
    out: Annotated[Path, typer.Option(help="Folder for index.html and tables/.")] = Path("report"),
    model: Key = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="The text that was read, to show tokens where no tokenizer is here."),
    ] = None,
    n_boot: Annotated[int, typer.Option(help="Resamples of whole documents.")] = 2000,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    seed: int = 0,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained page of what a study found, and its tables.

    Example: [bold]geomstats-lm report results/quickstart/study.zarr --out report/[/bold]
    """
    from geomstats_lm import report as verb

    page = verb(
        store, out, models=model, corpus=text, n_boot=n_boot, level=level, seed=seed,
        progress=not quiet,
    )  # fmt: skip
    typer.echo(f"Written to {page}, tables to {page.parent / 'tables'}")


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(help="Zarr store of the study.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Read every value, not a sample.")
    ] = False,
    seed: int = 0,
) -> None:
    """Check a store against its schema, ledgers and checksums; exit code 1 if anything is wrong.

    Example: [bold]geomstats-lm verify results/quickstart/study.zarr[/bold]
    """
    from geomstats_lm import verify_study

    findings = verify_study(store, sample=None if everything else 4, seed=seed)
    if len(findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; errors of use are one line and exit code 2."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    # Advice that other libraries print on import is not what the user asked for.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    shown: set[str] = set()

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if str(message) not in shown:  # once, and without the line of code it came from
            shown.add(str(message))
            typer.echo(f"geomstats-lm: warning: {message}", err=True)

    warnings.showwarning = show
    try:
        app()
    except (ValueError, TypeError, FileNotFoundError, KeyError, OverflowError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        typer.echo(f"geomstats-lm: {text}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"geomstats-lm: {error}; what was written stays, and the same command "
                   "carries on", err=True)  # fmt: skip
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("geomstats-lm: interrupted; the same command carries on", err=True)
        sys.exit(130)


def _nodes(store: Path, keys: list[str] | None) -> list[tuple[str, Any]]:
    from geomstats_lm.cube import open_node, open_study

    known = [k for k in open_study(store, incomplete="skip").children if k != "statistics"]
    unknown = sorted(set(keys or []) - set(known))
    if unknown or not known:
        raise ValueError(f"{store}: no model {', '.join(unknown)} in it; there are {known}")
    return [(key, open_node(store, key)) for key in keys or known]


def _say(store: Path, key: str, leaf: str, dataset: Any) -> None:
    sizes = ", ".join(f"{dim} {size}" for dim, size in dataset.sizes.items())
    typer.echo(f"{store}/{key}/{leaf}: {sizes}")


if __name__ == "__main__":
    main()
