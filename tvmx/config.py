"""Options of tvmx: frozen dataclasses, validated once. The CLI and the Python API both fill these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tvmx.errors import ConfigError


@dataclass(frozen=True)
class Dim:
    """A named symbolic dimension with an inclusive range; `max=None` means no upper bound."""

    name: str
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"Dim({self.name!r}): a symbolic dim needs a name like 'N' or 'seq_len'")
        if self.min < 0 or (self.max is not None and self.max < self.min):
            raise ConfigError(f"Dim({self.name!r}, {self.min}, {self.max}): the range must hold 0 <= min <= max")


Shapes = Mapping[str, Sequence["int | str | Dim"]]


def parse_shape(text: str) -> tuple[str, tuple[int | str | Dim, ...]]:
    """`"x=N:1..8,3,224,224"` → `("x", (Dim("N", 1, 8), 3, 224, 224))`; the last `=` separates name and dims."""
    name, equals, dims = text.rpartition("=")
    if not equals or not name:
        raise ConfigError(f"--shape {text!r}: write it as NAME=DIM,DIM,... like --shape x=1,3,224,224")
    return name, tuple(_parse_dim(d.strip(), text) for d in dims.split(",") if d.strip())


def _parse_dim(text: str, whole: str) -> int | str | Dim:
    try:
        if text.lstrip("-").isdigit():
            value = int(text)
            if value < 0:
                raise ConfigError(f"--shape {whole!r}: dimension {value} is negative; give its size or a name")
            return value
        name, colon, bounds = text.partition(":")
        if not colon:
            return Dim(name).name
        low, dots, high = bounds.partition("..")
        if not dots:
            raise ValueError(bounds)
        return Dim(name, int(low or 1), int(high) if high else None)
    except ValueError:
        raise ConfigError(
            f"--shape {whole!r}: cannot read dimension {text!r}; use a number, a name, or NAME:MIN..MAX"
        ) from None


@dataclass(frozen=True)
class CompileConfig:
    """What `tvmx compile` does. `threads=None` means every core this process may use."""

    target: str = "native"
    threads: int | None = None
    log: str | None = None  # tuning log folder; None: the logs that ship with tvmx
    use_shipped_logs: bool = True
    dump_ir: str | None = None  # folder for the IR after each phase
    planner: str = "best"  # memory planner
    planner_budget_s: float = 2.0
    precision: str | None = None  # fp32, fp16, bf16, int8, or a .toml/.json file; None: as the model says
    io_precision: str | None = None  # keep, fp32, fp16, bf16: of float32 inputs and outputs
    prefer: str | None = None  # speed or size: what decides where 16 bits are storage only
    streams: int = 4  # CUDA targets: the most streams that independent kernels are spread over

    def __post_init__(self) -> None:
        _check_threads(self.threads)
        if self.planner_budget_s < 0:
            raise ConfigError(f"planner_budget_s={self.planner_budget_s}: must be >= 0")
        if not 1 <= self.streams <= 32:
            raise ConfigError(f"streams={self.streams}: use 1 to 32")


@dataclass(frozen=True)
class TuneConfig:
    """What `tvmx tune` does. Ends at whichever of `max_trials` (in all) and `time_budget_s` comes first."""

    target: str = "native"
    threads: int | None = None
    log: str = "tuning_logs/local"
    max_trials: int = 1000
    time_budget_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_threads(self.threads)
        if self.max_trials < 1:
            raise ConfigError(f"max_trials={self.max_trials}: must be >= 1")
        if self.time_budget_s <= 0:
            raise ConfigError(f"time_budget_s={self.time_budget_s}: must be > 0")


def _check_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError(f"threads={threads}: use 1 to 1024")


Config = TypeVar("Config", CompileConfig, TuneConfig)


def load_toml(cls: type[Config], path: str | Path, section: str) -> Config:
    """Read `[section]` of a TOML file as `cls`. Raises ConfigError naming an unknown key and what is near it."""
    import difflib
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    table = data.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{section}] must be a table")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known) or sorted(known)
            raise ConfigError(f"{path}: unknown option {key!r} in [{section}]; did you mean {', '.join(near)}?")
        _check_type(path, section, key, value, str(known[key].type))
    return cls(**table)


def _check_type(path: str | Path, section: str, key: str, value: Any, declared: str) -> None:
    names = [n.strip() for n in declared.split("|")]
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    allowed = tuple(k for n in names for k in kinds.get(n, ()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in names):
        raise ConfigError(f"{path}: [{section}] {key} = {value!r} must be {declared}")


def to_toml(config: CompileConfig | TuneConfig, section: str) -> str:
    """The options as a TOML table that `load_toml` reads back; None is left out."""
    lines = [f"[{section}]"]
    for name, value in dataclasses.asdict(config).items():
        if value is None:
            continue
        text = str(value).lower() if isinstance(value, bool) else _toml_value(value)
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def _toml_value(value: int | float | str) -> str:
    if not isinstance(value, str):
        return repr(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
