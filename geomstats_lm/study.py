"""How does one file declare a whole study, and one call run it?

A TOML file names models, a text and settings; :func:`run_study` takes them through the verbs in
order, ``extract -> decompose -> geometry -> perturb -> rank_correlation``, resumes what was
interrupted, and writes the tables and figures.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

import pydantic

from geomstats_lm.cube import has_leaf, list_leaves, model_key

STEPS = ("activations", "decomposition", "geometry", "perturbation")
DEFAULT_CLASSES = (
    "identity", "mean", "token_mean", "local_mean", "diagonal", "linear", "affine",
    "affine[scope=global]",
)  # fmt: skip


class StudyError(ValueError):
    """The declaration of a study is not valid; the message has one line per problem."""


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """One model: where it is and how it is loaded."""

    path: str
    name: str | None = None
    revision: str | None = None
    untrained: bool = False
    seed: int = 0
    trust_remote_code: bool = False


class WindowSection(_Section):
    """How the text is cut and split."""

    length: int = pydantic.Field(128, ge=2)
    reference: int | None = pydantic.Field(None, ge=1)
    evaluation: int | None = pydantic.Field(None, ge=1)
    evaluation_share: float = pydantic.Field(1 / 3, gt=0, lt=1)
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _pair(self) -> WindowSection:
        if (self.reference is None) != (self.evaluation is None):
            raise ValueError("give both reference and evaluation windows, or neither")
        return self

    @property
    def n_windows(self) -> tuple[int, int] | None:
        if self.reference is None or self.evaluation is None:
            return None
        return self.reference, self.evaluation


class ExtractSection(_Section):
    """How states are stored."""

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: int = pydantic.Field(16, ge=1)


class DecomposeSection(_Section):
    """Which function classes are fitted, and how."""

    classes: tuple[str, ...] = DEFAULT_CLASSES
    k: int = pydantic.Field(32, ge=1)
    ridge: float | None = None
    target: Literal["update", "state"] = "update"
    metric: Literal["euclidean", "cosine", "standardized"] = "euclidean"


class PerturbSection(_Section):
    """Which approximations replace layers, where, and beside which controls."""

    function_class: tuple[str, ...] | None = None
    positions: tuple[Literal["all", "single"], ...] = ("all", "single")
    n_single: int = pydantic.Field(8, ge=1)
    controls: tuple[Literal["exchanged", "gaussian", "isotropic"], ...] = ("exchanged",)
    draws: int = pydantic.Field(1, ge=1)
    seed: int = 0


class CorrelateSection(_Section):
    """How residual size and output damage are correlated."""

    method: Literal["spearman", "kendall", "pearson"] = "spearman"
    norm: Literal["raw", "relative", "standardized"] = "raw"
    n_boot: int = pydantic.Field(2000, ge=100)
    level: float = pydantic.Field(0.95, gt=0, lt=1)
    seed: int = 0


class StudyConfig(_Section):
    """A declared study; relative paths start at the folder of the TOML file."""

    models: tuple[ModelSection, ...] = pydantic.Field(min_length=1)
    corpus: tuple[str, ...] = pydantic.Field(min_length=1)
    output: str
    separator: str | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    windows: WindowSection = WindowSection()
    extract: ExtractSection = ExtractSection()
    decompose: DecomposeSection = DecomposeSection()
    perturb: PerturbSection = PerturbSection()
    correlate: CorrelateSection = CorrelateSection()

    @pydantic.field_validator("models", mode="before")
    @classmethod
    def _models(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str | dict) else value
        return [{"path": v} if isinstance(v, str) else v for v in value]

    @pydantic.field_validator("corpus", mode="before")
    @classmethod
    def _corpus(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> StudyConfig:
        unknown = set(self.perturbed) - set(self.decompose.classes)
        if unknown:
            raise ValueError(
                f"perturb.function_class {sorted(unknown)} are not among decompose.classes"
            )
        reference = self.windows.reference
        if reference is not None and self.decompose.k > reference * (self.windows.length - 1):
            raise ValueError(
                f"decompose.k = {self.decompose.k} is larger than the reference set of "
                f"{reference} windows x {self.windows.length - 1} tokens"
            )
        return self

    @property
    def perturbed(self) -> tuple[str, ...]:
        """Labels whose damage is measured: all fitted classes unless the study names some."""
        if self.perturb.function_class is not None:
            return self.perturb.function_class
        return self.decompose.classes

    @property
    def store(self) -> Path:
        return Path(self.output) / "study.zarr"


def read_study(path: str | Path) -> StudyConfig:
    """Read and check a study's declaration.

    Parameters
    ----------
    path : str or Path
        TOML file.  Relative paths in it start at its own folder.

    Returns
    -------
    StudyConfig
        With paths resolved.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    StudyError
        If a key is unknown, a value is not accepted, or a path does not exist.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("Some text.")
    >>> declared = 'models = ["org/model"]\\ncorpus = "text.txt"\\noutput = "out"'
    >>> _ = (folder / "study.toml").write_text(declared)
    >>> read_study(folder / "study.toml").decompose.k
    32
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no study file {path}")
    try:
        declared = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} is no TOML: {error}") from None
    try:
        config = StudyConfig.model_validate(declared)
    except pydantic.ValidationError as error:
        raise StudyError("\n".join(_problem(path, e) for e in error.errors())) from None
    return _resolved(config, path)


def _problem(path: Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = StudyConfig
        for part in error["loc"][:-1]:
            field = getattr(section, "model_fields", {}).get(part)
            section = getattr(field, "annotation", None) if field else ModelSection
        known = ", ".join(getattr(section, "model_fields", {}))
        return f"{path}: unknown key {where!r}; accepted are {known}"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = f" (given {error['input']!r:.60})" if where and error["type"] != "missing" else ""
    return f"{path}: {where + ': ' if where else ''}{message}{given}"


def _resolved(config: StudyConfig, path: Path) -> StudyConfig:
    folder = path.resolve().parent
    problems = []
    corpus = []
    for text in config.corpus:
        if not (folder / text).exists():
            problems.append(f"{path}: corpus: there is no {text} (looked in {folder})")
        corpus.append(str(folder / text))
    models = []
    for model in config.models:
        place = folder / model.path
        # "org/name" may be a hub id; anything that looks like a path must be there
        is_hub_id = model.path.count("/") <= 1 and not model.path.startswith((".", "/", "~"))
        if place.exists():
            model = model.model_copy(update={"path": str(place.resolve())})
        elif not is_hub_id or model.path.endswith(".gguf"):
            problems.append(f"{path}: models: there is no {model.path} (looked in {folder})")
        models.append(model)
    keys = [key_of(model) for model in models]
    for key in sorted({k for k in keys if keys.count(k) > 1}):
        problems.append(f"{path}: models: two models would be stored as {key!r}; give one a name")
    if problems:
        raise StudyError("\n".join(problems))
    return config.model_copy(
        update={
            "models": tuple(models), "corpus": tuple(corpus),
            "output": str((folder / config.output).resolve()),
        }
    )  # fmt: skip


def key_of(model: ModelSection) -> str:
    """Key that the model of a study is stored under."""
    from geomstats_lm.models import default_name

    return model_key(model.name or default_name(model.path, untrained=model.untrained))


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
        The output folder: ``study.zarr``, ``table.csv``, ``table.md``, ``figures/``.

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

    cut = {key_of(model): cut_windows(config, model) for model in config.models}
    for model in config.models:
        _run_model(config, model, cut[key_of(model)], overwrite, progress)
    write_report_files(config, progress=progress)
    (output / "study.json").write_text(json.dumps(_fingerprint(config), indent=1), encoding="utf-8")
    return output


def cut_windows(config: StudyConfig, model: ModelSection) -> Any:
    """Windows of one model of a study, checked to hold enough reference tokens for ``k``."""
    from geomstats_lm.corpus import read_corpus, windows
    from geomstats_lm.models import load_tokenizer

    corpus = read_corpus([Path(p) for p in config.corpus], separator=config.separator)
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


def _run_model(
    config: StudyConfig, model: ModelSection, cut: Any, overwrite: bool, progress: bool
) -> None:
    from geomstats_lm.cube import open_study
    from geomstats_lm.decompose import decompose
    from geomstats_lm.extract import extract
    from geomstats_lm.geometry import geometry
    from geomstats_lm.models import load_model
    from geomstats_lm.perturb import perturb

    store, key = config.store, key_of(model)
    loaded = load_model(
        model.path, name=model.name, device=config.device, dtype=config.dtype,
        revision=model.revision, trust_remote_code=model.trust_remote_code,
        untrained=model.untrained, seed=model.seed,
    )  # fmt: skip
    how: dict[str, Any] = {"store": store, "overwrite": overwrite, "progress": progress}
    extract(loaded, cut, dtype=config.extract.dtype, batch_size=config.extract.batch_size, **how)
    node = open_study(store, incomplete="skip")[key]
    options = config.decompose.model_dump()
    decompose(node, **options, device=config.device, **how)
    geometry(open_study(store, incomplete="skip")[key], **how)
    perturb(
        loaded,
        open_study(store, incomplete="skip")[key],
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
    there = all(has_leaf(config.store, key_of(m), step) for m in config.models for step in STEPS)
    return there and (output / "table.csv").exists() and (output / "table.md").exists()


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
        "leaves": [p for p in list_leaves(config.store)] if config.store.exists() else [],
    }
