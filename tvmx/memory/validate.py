"""The judge of every plan. Shares no code with the planners; works on buffers, not on blocks."""

from __future__ import annotations

from bisect import bisect_left, insort

from tvmx.errors import PlanError
from tvmx.memory.problem import INPLACE, VIEW, Buffer, Problem, Solution


def validate(problem: Problem, solution: Solution) -> None:
    """Raise PlanError, naming the buffers, unless the plan keeps every rule:

    each buffer has an aligned offset >= 0 that equals its pin, aliases lie where they share,
    buffers that share no storage and live at the same time are disjoint in bytes (storage counts
    as alive from the first start to the last end of all that share it), values that share storage
    are never overwritten before their last use, and height and lower_bound hold.
    """
    offsets = solution.offsets
    top = 0
    for b in problem.buffers:
        at = offsets.get(b.id)
        if at is None:
            raise PlanError(f"buffer {b.id!r} has no offset in the plan")
        if at < 0:
            raise PlanError(f"buffer {b.id!r} is at the negative offset {at}")
        if at % b.alignment:
            raise PlanError(f"buffer {b.id!r}: offset {at} is not a multiple of {b.alignment}")
        if b.offset is not None and at != b.offset:
            raise PlanError(f"buffer {b.id!r} is pinned to {b.offset} but placed at {at}")
        if b.alias_of is not None and at != offsets.get(b.alias_of, -1) + b.alias_offset:
            raise PlanError(
                f"buffer {b.id!r} at {at} shares {b.alias_of!r} at {offsets.get(b.alias_of)} "
                f"and must be {b.alias_offset} bytes into it"
            )
        if b.size:
            top = max(top, at + b.size)
    if len(offsets) != len(problem.buffers):
        extra = next(id for id in offsets if id not in {b.id for b in problem.buffers})
        raise PlanError(f"the plan places {extra!r}, which is not a buffer of the problem")
    storages = _storages(problem)
    _check_disjoint(storages, offsets)
    for group in storages:
        if len(group) > 1:
            _check_sharing(group, offsets)
    if solution.height != top:
        raise PlanError(f"the plan claims a height of {solution.height} but reaches {top}")
    if solution.lower_bound > top:
        raise PlanError(f"the plan of {top} bytes claims a lower bound {solution.lower_bound}")


def _storages(problem: Problem) -> list[list[Buffer]]:
    """Buffers grouped by the storage that they share."""
    groups: dict[str, list[Buffer]] = {}
    for b in problem.buffers:
        root = b
        while root.alias_of is not None:
            root = problem[root.alias_of]
        groups.setdefault(root.id, []).append(b)
    return list(groups.values())


def _check_disjoint(storages: list[list[Buffer]], offsets: dict[str, int]) -> None:
    """Sweep over time; the storages alive at an instant are kept sorted by address."""
    events: list[tuple[int, int, int]] = []  # (time, 0 end | 1 start, storage): ends come first
    low: list[int] = []
    high: list[int] = []
    for k, group in enumerate(storages):
        sized = [b for b in group if b.size]
        low.append(min((offsets[b.id] for b in sized), default=0))
        high.append(max((offsets[b.id] + b.size for b in sized), default=0))
        if sized:
            events.append((min(b.start for b in group), 1, k))
            events.append((max(b.end for b in group), 0, k))
    events.sort()
    alive: list[tuple[int, int]] = []  # (lowest byte, storage), disjoint
    for _, is_start, k in events:
        i = bisect_left(alive, (low[k], k))
        if not is_start:
            del alive[i]
            continue
        for j in (i - 1, i):
            if 0 <= j < len(alive):
                other = alive[j][1]
                if low[k] < high[other] and low[other] < high[k]:
                    raise PlanError(_overlap(storages[k], storages[other], offsets))
        insort(alive, (low[k], k))


def _overlap(group: list[Buffer], other: list[Buffer], offsets: dict[str, int]) -> str:
    def says(b: Buffer) -> str:
        at = offsets[b.id]
        return f"{b.id!r} (bytes [{at}, {at + b.size}), alive [{b.start}, {b.end}))"

    def clash(a: Buffer, b: Buffer) -> bool:
        return _bytes_meet(a, b, offsets) and a.start < b.end and b.start < a.end

    pair = next(((a, b) for a in group for b in other if clash(a, b)), None)
    if pair is None:  # only the storage is alive: a gap between the uses of those that share it
        return (
            f"the storages of {says(group[0])} and {says(other[0])} overlap; storage stays alive "
            "between the uses of all buffers that share it"
        )
    return f"buffers {says(pair[0])} and {says(pair[1])} overlap"


def _bytes_meet(a: Buffer, b: Buffer, offsets: dict[str, int]) -> bool:
    at, bt = offsets[a.id], offsets[b.id]
    return at < bt + b.size and bt < at + a.size


def _check_sharing(group: list[Buffer], offsets: dict[str, int]) -> None:
    """No value in a shared storage is overwritten while someone still needs it."""
    here = {b.id: b for b in group}
    value: dict[str, str] = {}  # buffer → name of the value it holds: views hold their parent's
    for b in group:
        head = b
        while head.alias_of is not None and head.alias == VIEW:
            head = here[head.alias_of]
        value[b.id] = head.id
    inplace = {frozenset((b.id, b.alias_of)) for b in group if b.alias_of and b.alias == INPLACE}
    inplace_values = {frozenset(value[i] for i in pair) for pair in inplace}
    needed = {b.id: _needed(b, here) for b in group}
    ordered = sorted((b for b in group if b.size), key=lambda b: needed[b.id])
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if needed[b.id][0] >= needed[a.id][1]:
                break
            if not _bytes_meet(a, b, offsets):
                continue
            if value[a.id] == value[b.id]:
                _check_same_value(a, b, here)
                continue
            early, late = a, b  # ordered is by the start of the need
            handed_over = (
                frozenset((value[a.id], value[b.id])) in inplace_values
                and any(late.id in pair for pair in inplace)
                and needed[early.id][1] <= late.start + 1
                and early.start < late.start
            )
            if not handed_over:
                raise PlanError(
                    f"buffer {late.id!r}, written at {late.start}, overwrites {early.id!r}, which"
                    f" is needed until {needed[early.id][1]}, in the storage that they share"
                )


def _needed(b: Buffer, here: dict[str, Buffer]) -> tuple[int, int]:
    """When the bytes of b must hold its value: a view from its parent's start, a slot until it."""
    if b.alias_of is None or b.alias != VIEW:
        return b.lifespan
    parent = here[b.alias_of]
    if b.start >= parent.start:
        return parent.start, b.end
    return b.start, max(b.end, parent.start + 1)


def _check_same_value(a: Buffer, b: Buffer, here: dict[str, Buffer]) -> None:
    """Two slots of one parent are written separately, so their bytes must not meet."""

    def writes(x: Buffer) -> bool:
        return x.alias_of is not None and x.alias == VIEW and x.start < here[x.alias_of].start

    def inside(x: Buffer, y: Buffer) -> bool:
        hop: Buffer | None = x
        while hop is not None and hop is not y:
            hop = here[hop.alias_of] if hop.alias_of is not None and hop.alias == VIEW else None
        return hop is y

    if writes(a) and writes(b) and not inside(a, b) and not inside(b, a):
        raise PlanError(f"buffers {a.id!r} and {b.id!r} are slots of one parent and overlap in it")
