"""Options of tvmx: frozen dataclasses, validated once."""

from __future__ import annotations

from dataclasses import dataclass

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
