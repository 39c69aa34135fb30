"""An entry that is several programs: one decides, the others are the branches of an If that only the run can settle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tvmx.errors import InputError
from tvmx.runtime.manifest import Entry
from tvmx.runtime.slots import Array, check_names


class Program(Protocol):
    """What an executor needs of an entry."""

    entry: Entry
    out_names: list[str]

    @property
    def arena_bytes(self) -> int: ...
    @property
    def arena_lower_bound(self) -> int: ...
    def feed(self, inputs: Mapping[str, Any], copy: bool = False) -> None: ...
    def set_input(self, name: str, value: Any, copy: bool = True) -> None: ...
    def call(self) -> list[Array]: ...
    def run(self) -> None: ...
    def results(self) -> list[Array]: ...


class BranchProgram:
    """Runs `condition`, then the branch that it says. The branches have the same inputs and outputs."""

    def __init__(self, condition: Program, then: Program, otherwise: Program) -> None:
        self.entry = then.entry
        self.out_names = then.out_names
        self._condition, self._then, self._otherwise = condition, then, otherwise
        self._deciding = {i.name for i in condition.entry.inputs}
        self._inputs = {i.name: i for i in then.entry.inputs}
        self._taken: Program | None = None

    @property
    def arena_bytes(self) -> int:
        """Bytes of all three arenas."""
        return sum(p.arena_bytes for p in (self._condition, self._then, self._otherwise))

    @property
    def arena_lower_bound(self) -> int:
        """The three lower bounds together."""
        return sum(p.arena_lower_bound for p in (self._condition, self._then, self._otherwise))

    def feed(self, inputs: Mapping[str, Any], copy: bool = False) -> None:
        """Bind every input. Raises InputError."""
        check_names(inputs, self._inputs)
        self._condition.feed({n: a for n, a in inputs.items() if n in self._deciding}, copy)
        self._then.feed(inputs, copy)
        self._otherwise.feed(inputs, copy)

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input. Raises InputError."""
        if name in self._deciding:
            self._condition.set_input(name, value, copy)
        self._then.set_input(name, value, copy)
        self._otherwise.set_input(name, value, copy)

    def call(self) -> list[Array]:
        """Run and return arrays that the caller owns."""
        return self.choose().call()

    def run(self) -> None:
        """Run into the chosen program's own output arrays."""
        self.choose().run()

    def results(self) -> list[Array]:
        """The outputs of the last run."""
        if self._taken is None:
            raise InputError("there is no output yet; call run() first")
        return self._taken.results()

    def choose(self) -> Program:
        """Run the condition on the inputs that are set; returns the branch to run."""
        self._condition.run()
        self._taken = self._then if bool(self._condition.results()[0]) else self._otherwise
        return self._taken
