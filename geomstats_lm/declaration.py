"""What does a study consist of, and is its declaration valid?

A TOML file names models, a text and settings; it is checked as a whole before anything runs, one
line per problem.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import pydantic

from geomstats_lm.class_labels import parse_classes
from geomstats_lm.cube import model_key
from geomstats_lm.decompose import DEFAULT_CLASSES


class StudyError(ValueError):
    """The declaration of a study is not valid; the message has one line per problem."""


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """One model: where it is and how it is loaded."""

    path: str = pydantic.Field(min_length=1)
    name: str | None = None
    revision: str | None = None
    untrained: bool = False
    seed: int = pydantic.Field(0, ge=0)
    trust_remote_code: bool = False


class WindowSection(_Section):
    """How the text is cut and split."""

    length: int = pydantic.Field(128, ge=2)
    reference: int | None = pydantic.Field(None, ge=1)
    evaluation: int | None = pydantic.Field(None, ge=1)
    evaluation_share: float = pydantic.Field(1 / 3, gt=0, lt=1)
    seed: int = pydantic.Field(0, ge=0)

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
    ridge: float | Literal["cv"] | None = None
    target: Literal["update", "state"] = "update"
    metric: Literal["euclidean", "cosine", "standardized"] = "euclidean"

    @pydantic.field_validator("ridge")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise ValueError("a ridge is finite and not negative")
        return value

    @pydantic.field_validator("classes")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one function class is needed")
        return tuple(parsed.label for parsed in parse_classes(value))


class PerturbSection(_Section):
    """Which approximations replace layers, where, and beside which controls."""

    function_class: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = pydantic.Field(None, min_length=1)
    positions: tuple[Literal["all", "single"], ...] = ("all", "single")
    n_single: int | None = pydantic.Field(8, ge=1)  # "all" in the file, None for the verb
    controls: tuple[Literal["exchanged", "gaussian", "isotropic"], ...] = ("exchanged",)
    draws: int = pydantic.Field(1, ge=1)
    seed: int = pydantic.Field(0, ge=0)

    @pydantic.field_validator("n_single", mode="before")
    @classmethod
    def _every_position(cls, value: Any) -> Any:
        return None if value == "all" else value

    @pydantic.field_validator("positions", "controls", "layers")
    @classmethod
    def _different(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if value is None:
            return None
        if not value or len(set(value)) < len(value):
            raise ValueError("at least one, and each once")
        return value

    @pydantic.field_validator("function_class")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(parsed.label for parsed in parse_classes(value))


class CorrelateSection(_Section):
    """How residual size and output damage are correlated."""

    method: Literal["spearman", "kendall", "pearson"] = "spearman"
    norm: Literal["raw", "relative", "standardized"] = "raw"
    n_boot: int = pydantic.Field(2000, ge=100)
    level: float = pydantic.Field(0.95, gt=0, lt=1)
    seed: int = pydantic.Field(0, ge=0)


class StudyConfig(_Section):
    """A declared study; relative paths start at the folder of the TOML file."""

    models: tuple[ModelSection, ...] = pydantic.Field(min_length=1)
    corpus: tuple[str, ...] = pydantic.Field(min_length=1)
    output: str = pydantic.Field(min_length=1)
    separator: str | None = pydantic.Field(None, min_length=1)
    device: str = pydantic.Field("cpu", pattern=r"^(cpu|cuda(:\d+)?|mps)$")
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
        if not isinstance(value, list | tuple):
            raise ValueError("accepted are a name or path, or a list of them")
        return tuple({"path": v} if isinstance(v, str) else v for v in value)

    @pydantic.field_validator("corpus", mode="before")
    @classmethod
    def _corpus(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and "" in value:
            raise ValueError("an empty path")
        return value

    @pydantic.field_validator("separator")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return value

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
        declared = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} is no TOML: {error}") from None
    try:
        config = StudyConfig.model_validate(declared)
    except pydantic.ValidationError as error:
        problems = [e for e in error.errors() if e["type"] != "too_short" or not e["input"]]
        raise StudyError("\n".join(_problem(path, e) for e in problems)) from None
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
        try:
            key_of(model)
        except ValueError as error:
            problems.append(f"{path}: models: {error}; give it another name")
    output = folder / config.output
    if output.exists() and not output.is_dir():
        problems.append(f"{path}: output: {config.output} is a file, not a folder")
    if problems:
        raise StudyError("\n".join(problems))
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
