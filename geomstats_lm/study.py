"""How does one file declare a whole study, and one call run it?

A TOML file names models, a text and settings; :func:`run_study` takes them through the verbs in
order, ``extract -> decompose -> geometry -> perturb -> rank_correlation``, resumes what was
interrupted, and writes the tables and figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from geomstats_lm.declaration import ModelSection, StudyConfig, StudyError, key_of, read_study

OUTPUTS = ("table.csv", "table.md", "correlations.csv", "figures", "report/index.html")
STEPS = ("activations", "decomposition", "geometry", "perturbation")


def run_study(
    study: StudyConfig | str | Path, *, overwrite: bool = False, progress: bool = True
) -> Path:
    """Run a declared study through all verbs, resuming what is there.

    Parameters
    ----------
    study : StudyConfig, str or Path
        From :func:`read_study`, or its TOML file.
    overwrite : bool
        Redo steps that were made with other settings.
    progress : bool
        Show progress bars.

    Returns
    -------
    Path
        The output folder: ``study.zarr``, ``table.csv``, ``table.md``, ``figures/``, ``report/``.

    Raises
    ------
    StudyError, FileNotFoundError, ValueError
        If the declaration, a model or the text does not do; before anything is written.
    SettingsError
        If a step in the store was made with other settings and ``overwrite`` is False.

    Examples
    --------
    >>> run_study("analyses/quickstart.toml")  # doctest: +SKIP
    """
    config = study if isinstance(study, StudyConfig) else read_study(study)
    output = Path(config.output)
    if is_finished(config):
        return output
    from geomstats_lm.report import write_report_files

    # all that can be told without running a model is told before anything is written
    corpus = read_text(config)
    cut = {key_of(model): cut_windows(config, model, corpus) for model in config.models}
    if len(config.models) > 1:
        for model in config.models:
            _check_model(load_section(config, model), cut[key_of(model)])
    for model in config.models:
        _run_model(config, model, cut[key_of(model)], overwrite, progress)
    write_report_files(config, corpus=corpus, progress=progress)
    (output / "study.json").write_text(json.dumps(_fingerprint(config), indent=1), encoding="utf-8")
    return output


def read_text(config: StudyConfig) -> Any:
    """The documents of a study, read once for all its models."""
    from geomstats_lm.corpus import read_corpus

    return read_corpus([Path(p) for p in config.corpus], separator=config.separator)


def cut_windows(config: StudyConfig, model: ModelSection, corpus: Any) -> Any:
    """Windows of one model of a study, checked to hold enough reference tokens for ``k``."""
    from geomstats_lm.corpus import windows
    from geomstats_lm.models import load_tokenizer

    tokenizer = load_tokenizer(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    given = config.windows
    cut = windows(
        corpus, tokenizer, length=given.length, n_windows=given.n_windows,
        evaluation_share=given.evaluation_share, seed=given.seed,
    )  # fmt: skip
    n_reference = int(((cut.split == 0) & (cut.position > 0) & ~cut.is_special).sum())
    if config.decompose.k > n_reference:
        raise StudyError(
            f"decompose.k = {config.decompose.k} is larger than the reference set of "
            f"{n_reference} tokens that the text gives {model.path}"
        )
    return cut


def load_section(config: StudyConfig, model: ModelSection) -> Any:
    """The model of one section of a study, loaded."""
    from geomstats_lm.models import load_model

    return load_model(
        model.path, name=model.name, device=config.device, dtype=config.dtype,
        revision=model.revision, trust_remote_code=model.trust_remote_code,
        untrained=model.untrained, seed=model.seed,
    )  # fmt: skip


def _check_model(loaded: Any, cut: Any) -> None:
    from geomstats_lm.extract import check_windows

    check_windows(loaded, cut)
    if not loaded.vocabulary or not loaded.causal:
        reason = "has no language-model head" if not loaded.vocabulary else "is not causal"
        raise StudyError(
            f"models: {loaded.name} {reason}, so its output cannot be perturbed; its states can "
            "be had with extract, decompose and geometry"
        )


def _run_model(
    config: StudyConfig, model: ModelSection, cut: Any, overwrite: bool, progress: bool
) -> None:
    from geomstats_lm.cube import open_node
    from geomstats_lm.decompose import decompose
    from geomstats_lm.extract import extract
    from geomstats_lm.geometry import geometry
    from geomstats_lm.perturb import perturb

    store, key = config.store, key_of(model)
    loaded = load_section(config, model)
    _check_model(loaded, cut)
    how: dict[str, Any] = {"store": store, "overwrite": overwrite, "progress": progress}
    extract(loaded, cut, dtype=config.extract.dtype, batch_size=config.extract.batch_size, **how)
    node = open_node(store, key)
    options = config.decompose.model_dump()
    decompose(node, **options, device=config.device, **how)
    geometry(open_node(store, key), **how)
    perturb(
        loaded,
        open_node(store, key),
        **{**config.perturb.model_dump(), "function_class": list(config.perturbed)},
        batch_size=config.extract.batch_size,
        **how,
    )


def is_finished(config: StudyConfig) -> bool:
    """Whether all of the study is there, made from the same declaration and files."""
    output = Path(config.output)
    try:
        before = json.loads((output / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if before != json.loads(json.dumps(_fingerprint(config))):
        return False
    from geomstats_lm.cube import IncompleteError, open_leaf

    try:
        for model in config.models:
            for step in STEPS:
                open_leaf(config.store, key_of(model), step)
    except (FileNotFoundError, IncompleteError):
        return False  # lost since: the steps say of what
    return all((output / name).exists() for name in OUTPUTS)


def _fingerprint(config: StudyConfig) -> dict[str, Any]:
    """The declaration, and size and time of the files it names."""
    from geomstats_lm import __version__

    files: dict[str, list[int]] = {}
    for place in (*config.corpus, *(m.path for m in config.models)):
        path = Path(place)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            if file.is_file():
                stat = file.stat()
                files[str(file)] = [stat.st_size, stat.st_mtime_ns]
    return {
        "version": __version__,
        "study": config.model_dump(mode="json"),
        "files": files,
    }
