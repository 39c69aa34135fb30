"""What a step of a program costs after a set of done steps; see `tvmx.memory.order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvmx.memory.order import Program


class Costs:
    """Sets of steps are bit masks. Bytes are those of `Program.size`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        n = len(program)
        self.touched = [0] * len(program.size)
        for step, storages in enumerate(program.touches):
            for s in set(storages):
                self.touched[s] |= 1 << step
        # Without bytes nothing to count; a storage once a step.
        self.counted = [tuple(dict.fromkeys(s for s in t if program.size[s])) for t in program.touches]
        self.before = [sum(1 << p for p in set(b)) for b in program.after]
        self.predecessors = [sorted(set(b)) for b in program.after]
        self.followers: list[list[int]] = [[] for _ in range(n)]
        for step, b in enumerate(self.predecessors):
            for p in b:
                self.followers[p].append(step)
        self.after_masks = [sum(1 << f for f in set(b)) for b in self.followers]
        self.everything = (1 << n) - 1

    def cost(self, done: int, step: int) -> tuple[int, int]:
        """(bytes more than before that the step needs while it runs, bytes more alive after it)."""
        born = dies = 0
        size, touched = self.program.size, self.touched
        left = ~done & ~(1 << step)
        for s in self.counted[step]:
            mask = touched[s]
            if not mask & done:
                born += size[s]
            if not mask & left:
                dies += size[s]
        need = born
        if born and dies:
            taken: set[int] = set()
            for out, source in self.program.over[step]:
                if (
                    out not in taken
                    and source not in taken
                    and out != source
                    and size[out] == size[source]
                    and touched[source] & done
                    and not touched[source] & left
                    and not touched[out] & done
                ):
                    need -= size[out]
                    taken |= {out, source}
        return need, born - dies

    def peak(self, steps: Sequence[int]) -> int:
        """Bytes of the highest step of a whole order."""
        done = live = peak = 0
        for step in steps:
            need, grows = self.cost(done, step)
            peak = max(peak, live + need)
            live += grows
            done |= 1 << step
        return peak

    def profile(self, done: int, live: int, steps: Sequence[int]) -> list[int]:
        """Bytes while each of the steps runs, from a state."""
        found = []
        for step in steps:
            need, grows = self.cost(done, step)
            found.append(live + need)
            live += grows
            done |= 1 << step
        return found

    def live(self, done: int) -> int:
        return sum(size for size, mask in zip(self.program.size, self.touched) if mask & done and mask & ~done)

    def least_step(self) -> int:
        """A bound: what the hungriest step needs by itself, whatever is done before it."""
        size = self.program.size
        best = 0
        for step, storages in enumerate(self.counted):
            total = sum(size[s] for s in storages)
            merged: set[int] = set()
            for out, source in self.program.over[step]:
                if size[out] == size[source] and out != source and not {out, source} & merged:
                    total -= size[out]
                    merged |= {out, source}
            best = max(best, total)
        return best
