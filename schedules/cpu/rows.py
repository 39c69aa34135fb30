"""Loop nests of a kernel: producers below the loops of their reader, inner loops vectorised, outer ones parallel."""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import SPATIAL, Info, inspect, leaves, uses
from tvmx_schedules.cpu.loops import (
    Loop,
    bindings_of,
    computes_with_position,
    has_varying_condition,
    is_indirect,
    lanes_of,
    loop_stride,
    loops_of,
    needs_tail,
    parallelize,
    vectorize_loop,
)
from tvmx_schedules.cpu.reduce import vectorize_reduction

from tvmx.target import Target

UNIT = object()  # label of a dimension of extent 1

FAR = 8  # elements apart from which a vector is gathered; nearer ones LLVM loads and shuffles

CHUNK_VECTORS = 4  # vectors of a kept contiguous axis that one step of fused blocks works on


def schedule_nests(sch: Any, target: Target) -> None:
    """Schedule all blocks below the root: sinks first, each taking along the producers that only it reads."""
    done: set[str] = set()
    for sink in reversed(leaves(sch)):
        if sink.name in done:
            continue
        group = _group(sch, sink, done)
        done.update(info.name for info in group)
        _schedule_group(sch, sink, [info for info in group if info is not sink], target)


def _group(sch: Any, sink: Info, done: set[str]) -> list[Info]:
    """`sink` and the blocks all of whose readers are in the group, readers first; only plain blocks move."""
    group = [sink]
    if not sink.is_plain or any(kind != SPATIAL for kind in sink.iter_kinds):
        return group
    for info in reversed(leaves(sch)):
        if info.name in done or info.name == sink.name or not info.is_plain:
            continue
        readers = [inspect(sch, c).name for c in sch.get_consumers(info.rv)]
        members = {member.name for member in group}
        if readers and all(reader in members for reader in readers):
            group.append(info)
    return group


def _schedule_group(sch: Any, sink: Info, producers: list[Info], target: Target) -> None:
    if not sink.is_plain or not sch.get_loops(sink.rv):
        return
    moved, shared = _shared_axes(sink, producers)
    left = [p for p in producers if p not in moved]
    if moved:
        _fuse_rows(sch, sink, moved, shared, target)
    else:
        _schedule_block(sch, sink, target)
    for producer in left:
        _schedule_group(sch, producer, [], target)


def _shared_axes(sink: Info, producers: list[Info]) -> tuple[list[Info], list[Any]]:
    """(producers that can move below `sink`'s loops, the sink's iterators that index all of them).

    Every block gets one label per spatial iterator: the iterator of the sink that it follows, or None. A producer that
    is read through a window (a padding, below a pool) stays: it would leave nothing of the windowed axes to share.
    """
    labels: dict[str, list[Any]] = {sink.name: [v.var for v in sink.block.iter_vars]}
    infos = {sink.name: sink}
    moved: list[Info] = []
    shared: list[Any] = list(labels[sink.name])
    for producer in producers:
        found, mixed = _labels(producer, infos, labels)
        if found is None or any(_size(sink, var) != 1 for var in shared if any(var is m for m in mixed)):
            continue
        common = [var for var in shared if any(var is label for label in found)]
        if not any(_size(sink, var) != 1 for var in common):
            continue
        labels[producer.name], infos[producer.name] = found, producer
        moved.append(producer)
        shared = common
    return moved, shared


def _size(info: Info, var: Any) -> int | None:
    for iter_var, extent in zip(info.block.iter_vars, info.extents):
        if iter_var.var is var or iter_var.var.same_as(var):
            return extent
    return None


def _labels(
    producer: Info, readers: dict[str, Info], labels: dict[str, list[Any]]
) -> tuple[list[Any] | None, list[Any]]:
    """For each iterator of `producer`, the sink's iterator that it runs along with in every read of its buffer.

    Also the sink's iterators that appear in an index together with others: windows, strides.
    """
    assert producer.store is not None
    dims: list[Any] | None = None
    mixed: list[Any] = []
    for name, reader in readers.items():
        for load in reader.loads:
            if not load.buffer.same_as(producer.output):
                continue
            here = []
            for index, extent in zip(load.indices, load.buffer.shape):
                if getattr(extent, "value", None) == 1:
                    here.append(UNIT)
                    continue
                label = None
                for iter_var, candidate in zip(reader.block.iter_vars, labels[name]):
                    if index.same_as(iter_var.var):
                        label = candidate
                    elif candidate is not None and uses(index, iter_var.var):
                        mixed.append(candidate)
                here.append(label)
            if dims is None:
                dims = here
            else:
                dims = [a if a is b else None for a, b in zip(dims, here)]
    if dims is None:
        return None, mixed
    out: list[Any] = []
    for iter_var, kind in zip(producer.block.iter_vars, producer.iter_kinds):
        label = None
        if kind == SPATIAL:
            for index, dim in zip(producer.store.indices, dims):
                if index.same_as(iter_var.var):
                    label = dim
        out.append(label)
    return out, mixed


def _fuse_rows(sch: Any, sink: Info, moved: list[Info], shared: list[Any], target: Target) -> None:
    work = float(sum(info.iterations * info.cost for info in (sink, *moved)))
    loops = loops_of(sch, sink)
    bindings = bindings_of(sch, sink)
    kept = []
    for var in shared:
        for iter_var, value in zip(sink.block.iter_vars, bindings):
            if iter_var.var.same_as(var):
                kept.extend(l for l in loops if l.var.same_as(value))
    outer = [l for l in loops if any(l is k for k in kept)]
    inner = [l for l in loops if not any(l is k for k in kept)]
    assert sink.store is not None
    last = loops[-1]
    rows = [l.rv for l in outer]
    if any(last is l for l in outer) and (last.extent is None or last.extent > 1):
        rows.pop()
        chunk = _chunk(last, lanes_of(sink, target))
        if chunk is None:
            tail = [*[l.rv for l in inner], last.rv]
        else:
            outer_part, inner_part = sch.split(last.rv, [None, chunk])
            rows.append(outer_part)
            tail = [*[l.rv for l in inner], inner_part]
    else:
        tail = [l.rv for l in inner]
    sch.reorder(*rows, *tail)
    if not rows:
        # One row: nothing to share; every block is its own nest.
        _schedule_block(sch, inspect(sch, sink.rv), target)
        for producer in moved:
            _schedule_block(sch, inspect(sch, producer.rv), target)
        return
    at = rows[-1]
    for producer in moved:
        sch.compute_at(producer.rv, at, preserve_unit_loops=True)
    depth = len(rows)
    inits = [_vectorize(sch, inspect(sch, info.rv), depth, target)[1] for info in (*moved, sink)]
    parallelize(sch, sch.get_loops(sink.rv)[:depth], work, target)
    for info, loop in zip((*moved, sink), inits):
        if loop is not None:
            sch.decompose_reduction(info.rv, loop)


def _chunk(loop: Loop, lanes: int) -> int | None:
    """How much of a shared contiguous axis one step takes: a few vectors, the axis if it is short or odd."""
    if loop.extent is None:
        return None
    for vectors in range(CHUNK_VECTORS, 0, -1):
        if loop.extent % (vectors * lanes) == 0:
            return vectors * lanes if loop.extent > vectors * lanes else None
    return None


def _schedule_block(sch: Any, info: Info, target: Target) -> None:
    """One block on its own: vectorised inside, parallel outside."""
    work = float(info.iterations * info.cost)
    if not info.is_reduction:
        _flatten(sch, info)
    inner_loops, init = _vectorize(sch, inspect(sch, info.rv), 0, target)
    outer = [l.rv for l in loops_of(sch, inspect(sch, info.rv)) if not l.reduction]
    limit = max(1, len(outer) - inner_loops)
    all_loops = sch.get_loops(info.rv)
    prefix = []
    for loop in loops_of(sch, inspect(sch, info.rv)):
        if loop.reduction or len(prefix) == limit:
            break
        prefix.append(loop.rv)
    if prefix and len(all_loops) > inner_loops:
        parallelize(sch, prefix, work, target)
    if init is not None:
        sch.decompose_reduction(info.rv, init)


def _flatten(sch: Any, info: Info) -> None:
    """Fuse all loops of a block whose every access walks its whole buffer in the same order."""
    assert info.store is not None
    for load in info.loads:
        shape_equal = [str(a) for a in load.buffer.shape] == [str(b) for b in info.store.buffer.shape]
        same = len(load.indices) == len(info.store.indices) and all(
            a.same_as(b) for a, b in zip(load.indices, info.store.indices)
        )
        if load.indices and not (same and shape_equal) and any(e != 1 for e in _shape(load.buffer)):
            return
    if has_varying_condition(info, lambda _: True) or computes_with_position(info):
        return
    loops = sch.get_loops(info.rv)
    order = [v.var for v in info.block.iter_vars]
    if len(loops) > 1 and len(order) == len(info.store.indices):
        if all(a.same_as(b) for a, b in zip(order, info.store.indices)):
            sch.fuse(*loops)


def _shape(buffer: Any) -> list[int | None]:
    return [getattr(e, "value", None) for e in buffer.shape]


def _vectorize(sch: Any, info: Info, skip: int, target: Target) -> tuple[int, Any]:
    """Vectorise a block's loops below the first `skip`.

    Returns how many inner loops must stay serial, and the loop at which to decompose a reduction (or None).
    """
    if info.is_reduction:
        return 1, vectorize_reduction(sch, info, skip, target)
    loops = loops_of(sch, info, skip)
    if not loops:
        return 0, None
    assert info.store is not None
    vector = None
    for loop in reversed(loops):
        if loop.extent != 1 and loop_stride(sch, info, info.store, loop.var) == 1:
            vector = loop
            break
    if vector is None:
        return 0, None
    if is_indirect(info) and needs_tail(vector, lanes_of(info, target)):
        return 1, None
    along = _transposed(sch, info, loops, vector)
    if along is not None and not _diverges(sch, info, vector):
        return _transpose(sch, loops, vector, along, lanes_of(info, target)), None
    if vector is not loops[-1]:
        sch.reorder(*[l.rv for l in loops if l is not vector], vector.rv)
    contiguous = all(loop_stride(sch, info, load, vector.var) in (0, 1) for load in info.loads)
    if not contiguous or _diverges(sch, info, vector):
        return 1, None  # LLVM's own vectoriser handles gathers and masks better than a scalarised vector loop
    return max(1, len(vectorize_loop(sch, vector.rv, lanes_of(info, target))) - 1), None


def _transposed(sch: Any, info: Info, loops: list[Loop], vector: Loop) -> Loop | None:
    """The loop along which a load is contiguous while it strides far along `vector`; None for another pattern."""
    found = None
    for load in info.loads:
        step = loop_stride(sch, info, load, vector.var)
        if step is None:
            return None
        if step < FAR:
            continue
        for loop in loops:
            if loop is not vector and loop.extent != 1 and loop_stride(sch, info, load, loop.var) == 1:
                found = loop
    return found


def _transpose(sch: Any, loops: list[Loop], vector: Loop, along: Loop, lanes: int) -> int:
    """A vector of far-apart elements at a time, stepping along the source's own rows: their lines stay in L1.

    Returns how many inner loops must stay serial.
    """
    inner = vectorize_loop(sch, vector.rv, lanes)
    last = inner[-1]
    first = min(i for i, l in enumerate(loops) if l is vector or l is along)
    outer = [l.rv for l in loops[:first]]
    between = [l.rv for l in loops[first:] if l is not vector and l is not along]
    sch.reorder(*outer, *inner[:-1], *between, along.rv, last)
    return 2


def _diverges(sch: Any, info: Info, vector: Loop) -> bool:
    bound = [iv.var for iv, value in zip(info.block.iter_vars, bindings_of(sch, info)) if uses(value, vector.var)]
    return has_varying_condition(info, lambda expr: any(uses(expr, var) for var in bound))
