"""What the user asks for: a default, overrides by operator kind and by name, options. Pure data."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvmx.errors import ConfigError

# name → the accumulators it allows, the default first
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp32", "fp16"),
    "bf16": ("fp32",),
    "int8": ("int32",),
}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
SHORT = frozenset({"fp16", "bf16"})
FP16_MAX = 65504.0
FP16_MIN = 2.0**-24  # the smallest float16 above zero


@dataclass(frozen=True)
class Assignment:
    """The type an operator computes in and the one it accumulates in ("" = the precision's default)."""

    precision: str
    accumulate: str = ""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        allowed = PRECISIONS[self.precision]
        if not self.accumulate:
            object.__setattr__(self, "accumulate", allowed[0])
        elif self.accumulate not in allowed:
            raise ConfigError(
                f"{self.precision} cannot accumulate in {self.accumulate!r}; use one of {', '.join(allowed)}"
            )

    def __str__(self) -> str:
        plain = self.accumulate == PRECISIONS[self.precision][0]
        return self.precision if plain else f"{self.precision}/{self.accumulate}"


@dataclass(frozen=True)
class PrecisionRules:
    """How to assign precisions.

    `operators` maps names and globs of ONNX nodes to assignments: an exact name wins over globs, of those the first.
    `kinds` does the same for operator kinds, as Relax ("nn.softmax") or ONNX ("Softmax") calls them. What neither
    names keeps what the model itself says (int8 between Q and DQ, float16), then float32 if its kind is sensitive,
    then takes `default`.

    `io`: "keep", or the precision of the program's float32 inputs and outputs. `prefer`: "speed" uses 16 bits only
    where that is modelled to be faster on the target, "size" wherever it is allowed. `ranges`: largest magnitudes
    observed, by operator name.
    """

    default: str = "fp32"
    kinds: Mapping[str, Assignment] = field(default_factory=dict)
    operators: Mapping[str, Assignment] = field(default_factory=dict)
    io: str = "keep"
    prefer: str = "speed"
    keep_first: bool = False
    keep_last: bool = False
    ranges: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.default not in PRECISIONS:
            raise ConfigError(
                f"precision {self.default!r} is unknown; use one of {', '.join(PRECISIONS)} or a .toml file"
            )
        if self.io not in ("keep", "fp32", *SHORT):
            raise ConfigError(f"io precision {self.io!r} is unknown; use keep, fp32, fp16 or bf16")
        if self.prefer not in ("speed", "size"):
            raise ConfigError(f"prefer={self.prefer!r}: use 'speed' or 'size'")

    @property
    def trivial(self) -> bool:
        """True if no operator can get anything but what the model says: nothing needs to run."""
        named = (*self.kinds.values(), *self.operators.values())
        return self.default == "fp32" and self.io in ("keep", "fp32") and not named


def match(patterns: Mapping[str, Assignment], names: tuple[str, ...]) -> tuple[str, Assignment] | None:
    """The pattern that decides for something known by several names, and what it assigns."""
    for name in names:
        if name in patterns:
            return name, patterns[name]
    for pattern, assignment in patterns.items():
        if is_glob(pattern) and any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return pattern, assignment
    return None


def is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")
