"""Blocks joined into boxes that cost no bytes: the plan read as a network of flows, reduced step by step.

In a plan without a gap every maximal vertical edge is a vertex, every block an arc from the edge where it starts to
the one where it ends, and sizes are a flow (Brooks, Smith, Stone & Tutte 1940). Three reductions undo the ways in
which a rectangle can be cut, each a box that loads every instant as its parts did, so the lower bound stays:
arcs between the same two vertices lie on one another, arcs through a vertex that has no others follow one another,
and five arcs in the shape of a Wheatstone bridge are a pinwheel. Instants where several edges meet are split into
vertices by their sizes when only one split is possible; what is left is guessed last. A plan of the boxes is a plan
of the blocks; the reverse need not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, combinations

import numpy as np
from numpy.typing import NDArray

from tvmx.memory.blocks import Ints
from tvmx.memory.components import MAX_UNITS, Component, sections

Int32s = NDArray[np.int32]
# Arcs of an instant whose subsets are looked at when it is split: the fewest first, for they are the least likely
# to match by chance, and what is joined in between leaves fewer.
# Instants where more arcs than this meet are busy.
BUSY = 32
ARCS = (4, 5, 6, 7, 8, 10, 12, 14, 16)
# Each list of boxes holds so many times as many as the one before.
LEVEL_RATIO = 4
# More ways to match subsets than this are no hint.
MAX_MATCHES = 2000
# Arcs looked at per block after which reducing ends: where thousands of blocks meet at an instant, it has no other end.
MOST_WORK = 300


@dataclass(frozen=True)
class Boxes:
    """A problem of boxes and where each block lies: `box_of[k]`, `inner[k]` units above its floor."""

    part: Component
    box_of: Ints
    inner: Ints

    def expand(self, offsets: Int32s) -> Int32s:
        """Offsets per box → offsets per block."""
        return (offsets[self.box_of] + self.inner).astype(np.int32)


def boxes(part: Component) -> list[Boxes]:
    """Boxes of a component, the fewest first, each list after it with several times as many, smaller ones.

    Empty when hardly any blocks can be joined, or when alignments differ.
    """
    if (part.align != 1).any():
        return []
    network = _Network(part)
    count = len(part.size)
    most_work = MOST_WORK * count + 100_000
    network.reduce(most_work)
    while network.work < most_work and (network.look_harder() or network.guess()):
        network.reduce(most_work)
    left = network.counts(count)
    levels, most = [], max(left[-1], 1)
    while most * LEVEL_RATIO <= count * 2:
        step = next(k for k, boxes_left in enumerate(left) if boxes_left <= most)
        levels.append(network.closed(part, count + step))
        most *= LEVEL_RATIO
    return levels


class _Network:
    """Arcs 0 to n - 1 are the blocks, later ones boxes; `within[a]` is the box that swallowed arc a, or -1."""

    def __init__(self, part: Component) -> None:
        self.tail, self.head, self.size = part.start.tolist(), part.end.tolist(), part.size.tolist()
        count = len(self.size)
        self.within, self.above = [-1] * count, [0] * count
        vertices = max(self.head, default=0) + 1
        self.into: list[set[int]] = [set() for _ in range(vertices)]
        self.out: list[set[int]] = [set() for _ in range(vertices)]
        self.time = list(range(vertices))
        self.last = vertices - 1
        self.between: Counter[tuple[int, int]] = Counter()
        self.whole: set[int] = set()  # vertices whose arcs no split can part
        self.busy = {0, vertices - 1}
        self.dirty: list[int] = list(range(vertices))
        self.waiting = set(self.dirty)
        self.asked: dict[int, tuple[int, ...]] = {}  # the arcs of a vertex that could not be split
        self.work = 0  # arcs looked at
        for arc in range(count):
            self._join_ends(arc)
        self.busy |= {v for v in range(vertices) if len(self.into[v]) + len(self.out[v]) > BUSY}

    def _touch(self, vertex: int) -> None:
        if vertex not in self.waiting:
            self.waiting.add(vertex)
            self.dirty.append(vertex)

    def _join_ends(self, arc: int) -> None:
        tail, head = self.tail[arc], self.head[arc]
        self.out[tail].add(arc)
        self.into[head].add(arc)
        self.between[tail, head] += 1
        self._touch(tail)
        self._touch(head)

    def _is_one(self, vertex: int) -> bool:
        """Whether a vertex is one edge for sure."""
        return vertex in self.whole or len(self.into[vertex]) <= 1 or len(self.out[vertex]) <= 1

    def _lie_together(self, tail: int, head: int) -> bool:
        """Whether arcs between two vertices are neighbours.

        As good as always, for two edges would have to meet at both instants. Where very many arcs meet, two of them
        have the other instant in common by chance, so that must be one edge for sure.
        """
        if tail in self.busy:
            return head not in self.busy and self._is_one(head)
        return head not in self.busy or self._is_one(tail)

    def _remove(self, arc: int) -> None:
        tail, head = self.tail[arc], self.head[arc]
        self.out[tail].discard(arc)
        self.into[head].discard(arc)
        self.between[tail, head] -= 1
        self._touch(tail)
        self._touch(head)

    def _box(self, tail: int, head: int, size: int, parts: list[tuple[int, int]]) -> None:
        """Replace arcs by one; parts are (arc, units above the floor of the box)."""
        box = len(self.size)
        self.tail.append(tail)
        self.head.append(head)
        self.size.append(size)
        self.within.append(-1)
        self.above.append(0)
        for arc, above in parts:
            self._remove(arc)
            self.within[arc], self.above[arc] = box, above
        self._join_ends(box)

    def reduce(self, most_work: int) -> None:
        """Apply the reductions that leave no choice until none applies or there was enough work."""
        while self.dirty and self.work < most_work:
            vertex = self.dirty.pop()
            self.waiting.discard(vertex)
            into, out = self.into[vertex], self.out[vertex]
            self.work += len(into) + len(out)
            self._stack(vertex)
            if not into or not out:
                continue
            if len(into) == len(out) == 1:
                self._follow(next(iter(into)), next(iter(out)))
            elif len(into) == 1 or len(out) == 1:
                self._pinwheel(vertex) or self._pinwheel_ending(vertex)

    def _stack(self, vertex: int) -> None:
        """Stack arcs of an instant that have the other one in common."""
        groups: dict[tuple[int, int], list[int]] = {}
        for arc in sorted(self.into[vertex] | self.out[vertex]):
            ends = self.tail[arc], self.head[arc]
            if self.between[ends] > 1:
                groups.setdefault(ends, []).append(arc)
        for (tail, head), arcs in groups.items():
            if self._lie_together(tail, head):
                self._pile(arcs)

    def _pile(self, arcs: list[int]) -> bool:
        size = sum(self.size[a] for a in arcs)
        if size > MAX_UNITS:
            return False
        floors = accumulate((self.size[a] for a in arcs), initial=0)
        self._box(self.tail[arcs[0]], self.head[arcs[0]], size, list(zip(arcs, floors)))
        return True

    def _follow(self, first: int, second: int) -> bool:
        if self.size[first] != self.size[second]:
            return False
        self._box(self.tail[first], self.head[second], self.size[first], [(first, 0), (second, 0)])
        return True

    def _pinwheel_ending(self, vertex: int) -> bool:
        """The same shape seen from its second inner vertex."""
        return any([self._pinwheel(self.tail[arc]) for arc in list(self.into[vertex])])

    def _pinwheel(self, u: int) -> bool:
        """Box s→u, s→v, u→v, u→t, v→t: four blocks around a fifth, whose middle is u→v."""
        if len(self.into[u]) != 1 or len(self.out[u]) != 2:
            return False
        (su,) = self.into[u]
        for middle in self.out[u]:
            v = self.head[middle]
            (ut,) = self.out[u] - {middle}
            if len(self.into[v]) != 2 or len(self.out[v]) != 1:
                continue
            (sv,), (vt,) = self.into[v] - {middle}, self.out[v]
            s, t, size = self.tail[su], self.head[ut], self.size
            if self.tail[sv] != s or self.head[vt] != t:
                continue
            if size[su] != size[middle] + size[ut] or size[vt] != size[middle] + size[sv]:
                continue
            parts = [(su, 0), (sv, size[su]), (middle, size[ut]), (ut, 0), (vt, size[ut])]
            self._box(s, t, size[su] + size[sv], parts)
            return True
        return False

    def look_harder(self) -> bool:
        """Split the instants of fewest arcs that can be; whether there are such."""
        several = [v for v in range(len(self.time)) if not self._is_one(v)]
        self.work += len(self.time)
        for most in ARCS:
            few = [v for v in several if len(self.into[v]) + len(self.out[v]) <= most]
            if any([self._split(vertex) for vertex in few]):
                return True
        return False

    def _split(self, vertex: int) -> bool:
        """Give arcs of one instant vertices of their own where their sizes allow one way only."""
        into, out = sorted(self.into[vertex]), sorted(self.out[vertex])
        if self.asked.get(vertex) == (*into, *out):
            return False
        balanced = sum(self.size[a] for a in into) == sum(self.size[a] for a in out)
        atoms = self._atoms(into, out) if balanced else []
        uses = Counter(arc for atom in atoms for arc in atom)
        alone = [atom for atom in atoms if all(uses[arc] == 1 for arc in atom)]
        if len(alone) == len(atoms) > 1:  # all of them: the last keeps the vertex
            alone.pop()
        if len(atoms) == 1:
            self.whole.add(vertex)
            self._touch(vertex)
            return any(self.between[self.tail[a], self.head[a]] > 1 for a in (*into, *out))
        if not alone:
            self.asked[vertex] = (*into, *out)
            return False
        for atom in alone:
            self._separate(vertex, atom)
        if len(alone) == len(atoms) - 1:
            self.whole.add(vertex)
        return True

    def _atoms(self, into: list[int], out: list[int]) -> list[frozenset[int]]:
        """Smallest sets of arcs whose sizes in equal their sizes out."""
        self.work += (1 << len(into)) + (1 << len(out))
        by_sum: dict[int, list[tuple[int, ...]]] = {}
        for count in range(1, len(out) + 1):
            for some in combinations(out, count):
                by_sum.setdefault(sum(self.size[a] for a in some), []).append(some)
        found: list[frozenset[int]] = []
        for count in range(1, len(into) + 1):
            for some in combinations(into, count):
                found += [frozenset(some + other) for other in by_sum.get(sum(self.size[a] for a in some), ())]
                if len(found) > MAX_MATCHES:
                    return []
        smallest: list[frozenset[int]] = []
        for arcs in sorted(found, key=len):
            if not any(atom <= arcs for atom in smallest):
                smallest.append(arcs)
        return smallest

    def _separate(self, vertex: int, arcs: Iterable[int]) -> None:
        """Move arcs to a new vertex of the same instant."""
        new = len(self.time)
        self.whole.add(new)
        self.time.append(self.time[vertex])
        self.into.append(set())
        self.out.append(set())
        for arc in list(arcs):
            self._remove(arc)
            if self.head[arc] == vertex:
                self.head[arc] = new
            else:
                self.tail[arc] = new
        for arc in list(arcs):
            self._join_ends(arc)

    def guess(self) -> bool:
        """Chain arcs of equal size where others could be: at a single time those without a second choice first."""
        return (
            self._guess_by(self._completing)
            or self._guess_stacks()
            or self._guess_by(self._unique)
            or self._guess_by(self._any)
        )

    def _guess_stacks(self) -> bool:
        """Stack what shares both its instants, though several edges may meet there: the smallest stacks first."""
        groups: dict[tuple[int, int], list[int]] = {}
        self.work += len(self.within)
        for arc, box in enumerate(self.within):
            if box < 0 and self.between[self.tail[arc], self.head[arc]] > 1:
                groups.setdefault((self.tail[arc], self.head[arc]), []).append(arc)
        least = min(map(len, groups.values()), default=0)
        return any([self._pile(arcs) for arcs in groups.values() if len(arcs) == least])

    def _guess_by(self, choose: object) -> bool:
        assert callable(choose)
        found = False
        for vertex in range(len(self.time)):
            if not self.into[vertex] or not self.out[vertex]:
                continue
            self.work += len(self.into[vertex]) + len(self.out[vertex])
            pair = choose(self._equal(vertex))
            if pair is not None:
                found = self._follow(*pair) or found
        return found

    def _equal(self, vertex: int) -> list[tuple[list[int], list[int]]]:
        """(arcs in, arcs out) of each size that occurs on both sides."""
        by_size: dict[int, tuple[list[int], list[int]]] = {}
        for arc in sorted(self.into[vertex]):
            by_size.setdefault(self.size[arc], ([], []))[0].append(arc)
        for arc in sorted(self.out[vertex]):
            if self.size[arc] in by_size:
                by_size[self.size[arc]][1].append(arc)
        return [pair for pair in by_size.values() if pair[1]]

    def _completing(self, equal: list[tuple[list[int], list[int]]]) -> tuple[int, int] | None:
        """A pair that gets a partner with the same two ends."""
        for into, out in equal:
            self.work += min(len(into), BUSY) * min(len(out), BUSY)
            for a in into[:BUSY]:
                for b in out[:BUSY]:
                    if self.between[self.tail[a], self.head[b]]:
                        return a, b
        return None

    def _unique(self, equal: list[tuple[list[int], list[int]]]) -> tuple[int, int] | None:
        return next(((into[0], out[0]) for into, out in equal if len(into) == len(out) == 1), None)

    def _any(self, equal: list[tuple[list[int], list[int]]]) -> tuple[int, int] | None:
        return next(((into[0], out[0]) for into, out in equal), None)

    def closed(self, part: Component, before: int | None = None) -> Boxes:
        """The boxes after the last step, or those of the time when `before` was the next arc to come."""
        before = len(self.size) if before is None else before
        outermost, above = [-1] * before, [0] * before
        top = []
        for arc in range(before - 1, -1, -1):  # boxes come after what they hold
            outer = self.within[arc]
            if 0 <= outer < before:
                outermost[arc], above[arc] = outermost[outer], above[outer] + self.above[arc]
            else:
                outermost[arc] = arc
                top.append(arc)
        start = np.array([self.time[self.tail[arc]] for arc in top], dtype=np.int64)
        end = np.array([self.time[self.head[arc]] for arc in top], dtype=np.int64)
        size = np.array([self.size[arc] for arc in top], dtype=np.int32)
        order = np.lexsort((end, start))
        number = np.zeros(before, dtype=np.int64)
        number[np.array(top)[order]] = np.arange(len(top))
        low, high = sections(start[order], end[order])
        ones = np.ones(len(top), dtype=np.int32)
        joined = Component(np.arange(len(top)), low, high, size[order], ones, part.unit)
        count = len(part.size)
        return Boxes(joined, number[np.array(outermost[:count])], np.array(above[:count]))

    def counts(self, count: int) -> list[int]:
        """How many arcs were left when arc `count + k` was the next to come."""
        swallowed = Counter(box for box in self.within if box >= 0)
        left = [count]
        for box in range(count, len(self.size)):
            left.append(left[-1] + 1 - swallowed[box])
        return left
