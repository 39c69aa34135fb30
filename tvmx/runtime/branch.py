"""An entry that is several programs: one decides, the others are the branches of an If that only the run can settle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tvmx.errors import InputError
from tvmx.runtime.manifest import Branch, Entry
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
    """Runs `condition`, then the branch that it says. The branches have the same inputs and outputs.

    `then` or `otherwise` is None where compilation left it out; the run that would take it raises InputError.
    """

    def __init__(self, branch: Branch, condition: Program, then: Program | None, otherwise: Program | None) -> None:
        self._branch = branch
        self._condition, self._then, self._otherwise = condition, then, otherwise
        self._sides = [p for p in (then, otherwise) if p is not None]
        self.entry = self._sides[0].entry
        self.out_names = self._sides[0].out_names
        self._deciding = {i.name for i in condition.entry.inputs}
        self._inputs = {i.name: i for i in self.entry.inputs}
        self._taken: Program | None = None

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(p.arena_bytes for p in (self._condition, *self._sides))

    @property
    def arena_lower_bound(self) -> int:
        """The lower bounds together."""
        return sum(p.arena_lower_bound for p in (self._condition, *self._sides))

    def feed(self, inputs: Mapping[str, Any], copy: bool = False) -> None:
        """Bind every input. Raises InputError."""
        check_names(inputs, self._inputs)
        self._condition.feed({n: a for n, a in inputs.items() if n in self._deciding}, copy)
        for side in self._sides:
            side.feed(inputs, copy)

    def set_input(self, name: str, value: Any, copy: bool = True) -> None:
        """Bind one input. Raises InputError."""
        if name in self._deciding:
            self._condition.set_input(name, value, copy)
        for side in self._sides:
            side.set_input(name, value, copy)

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
        """Run the condition on the inputs that are set; returns the branch to run.

        Raises InputError where that branch was left out of the library.
        """
        self._condition.run()
        yes = bool(self._condition.results()[0])
        self._taken = self._then if yes else self._otherwise
        if self._taken is None:
            deciding = ", ".join(sorted(map(repr, self._deciding))) or "no input"
            raise InputError(
                f"with these values of {deciding} the model takes the {'then' if yes else 'else'} branch of "
                f"{self._branch.node!r}, which does not exist at the compiled shapes ({self._branch.reason}); "
                "give other values, or compile for other shapes"
            )
        return self._taken
