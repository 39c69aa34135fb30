"""Options of quantisation in a TOML file: [quantize], [quantize.scheme], [quantize.overrides], [quantize.image]."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tvmx.errors import ConfigError
from tvmx.quantize.images import Preprocess
from tvmx.quantize.metrics import METRICS, Metric, load_metric
from tvmx.quantize.observers import DEFAULT_OBSERVER, OBSERVERS
from tvmx.quantize.scheme import Override, Scheme

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class QuantizeConfig:
    """What `tvmx quantize` does. `observer` "all" compares them all and uses the default.

    `max_drop`: the share of accuracy that may go (0.01 is 1 %); layers responsible for more stay in float.
    `metric`: how accuracy is measured, see `tvmx.quantize.metrics`; "auto" looks at the outputs; "FILE.py:NAME" is
    the user's own function.
    """

    target: str = "native"
    threads: int | None = None
    observer: str = DEFAULT_OBSERVER
    max_drop: float | None = None
    metric: str | Metric = "auto"
    measure: bool = False  # SQNR of each layer by running, as max_drop does too
    measure_speed: bool = False  # layers' times decide which stay in float, in place of a model of them
    speed_log: str | None = None  # file of measured times, read and added to
    scheme: Scheme = field(default_factory=Scheme)
    image: Preprocess | None = None

    def __post_init__(self) -> None:
        if self.observer != "all" and self.observer not in OBSERVERS:
            raise ConfigError(f"unknown observer {self.observer!r}; use one of {', '.join(OBSERVERS)}, or all")
        if isinstance(self.metric, str) and ":" in self.metric:
            object.__setattr__(self, "metric", load_metric(self.metric))
        if isinstance(self.metric, str) and self.metric not in ("auto", *METRICS):
            raise ConfigError(
                f"unknown metric {self.metric!r}; use auto, {', '.join(METRICS)}, FILE.py:FUNCTION or a function"
            )
        if self.max_drop is not None and not 0 <= self.max_drop < 1:
            raise ConfigError(f"max_drop={self.max_drop}: give the share of accuracy that may go, such as 0.01")


def load_settings(path: str | Path) -> QuantizeConfig:
    """Read the [quantize] tables of a TOML file. Raises ConfigError naming an unknown key and what is near it."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    table = dict(_table(data, "quantize", path))
    scheme = dict(_table(table, "scheme", path))
    overrides = _table(table, "overrides", path)
    image = table.pop("image", None)
    table.pop("scheme", None)
    table.pop("overrides", None)
    for pattern, precision in overrides.items():
        if not isinstance(precision, str):
            raise ConfigError(f"{path}: the override of {pattern!r} must be a string")
    scheme["overrides"] = tuple(Override(k, v) for k, v in overrides.items())
    table["scheme"] = _filled(Scheme, scheme, f"{path} [quantize.scheme]")
    if image is not None:
        table["image"] = _filled(Preprocess, image, f"{path} [quantize.image]")
    return _filled(QuantizeConfig, table, f"{path} [quantize]")


def _table(data: dict[str, Any], key: str, path: str | Path) -> dict[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: [{key}] must be a table")
    return found


T = TypeVar("T", Scheme, Preprocess, QuantizeConfig)

_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _filled(cls: type[T], values: dict[str, Any], where: str) -> T:
    """The dataclass from a table; lists become tuples. Raises ConfigError for unknown keys and wrong types."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known) or sorted(known)
            raise ConfigError(f"{where}: unknown option {key!r}; did you mean {', '.join(near)}?")
        if isinstance(value, list):
            if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
                raise ConfigError(f"{where}: {key} must be a list of numbers")
            value = tuple(value)
        _check_type(str(known[key].type), key, value, where)
        given[key] = value
    missing = [
        f.name
        for f in known.values()
        if f.name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    return cls(**given)


def _check_type(declared: str, key: str, value: Any, where: str) -> None:
    if declared.startswith("tuple"):
        if not isinstance(value, tuple):
            raise ConfigError(f"{where}: {key} must be a list")
        return
    names = [n.strip() for n in declared.split("|")]
    allowed = tuple(k for n in names for k in _KINDS.get(n, ()))
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in names)):
        raise ConfigError(f"{where}: {key} = {value!r} must be {declared}")
