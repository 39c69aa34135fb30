"""Matrix products on CPU: a register tile of C streams one panel of B, tiles are ordered for L1 and L2.

parallel (groups, row chunks, panel chunks)   balanced over the threads
  [pack_b of this group]                      where B cannot be read in place
  tile of rows                                mt × k of A stays in L1 ...
    [pack_a of these rows]
    panel                                     ... while the panels of this chunk stream from L2
      k                                       accumulators in registers
        row (unrolled) × vector
      epilogue
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import Info, as_int, inspect, leaves
from tvmx_schedules.cpu.conv_common import perfect
from tvmx_schedules.cpu.loops import PARTITION_HINT, vectorize_loop

from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, divisors, split_parallel, tile_of_panel
from tvmx.schedule import schedule_rule
from tvmx.target import Target

BYTES = 4  # float32


@schedule_rule("cpu.matmul", match=lambda w: w.op == "matmul", when=lambda t: t.kind == "cpu")
def matmul(sch: Any, target: Target) -> None:
    """C[g, m, j] over tiles that the legalization chose (`tvmx.tile`); any elementwise epilogue."""
    anchor = next(i for i in leaves(sch) if i.op == "matmul")
    sink = _inline_epilogue(sch, anchor)
    rows, panel = (int(v) for v in anchor.block.annotations["tvmx.tile"])
    packs = {i.name: i for i in leaves(sch) if i.name in ("pack_a", "pack_b")}
    _, lanes = tile_of_panel(panel, target)
    block = anchor.rv
    g, m, j, k = sch.get_loops(block)
    groups, height, width, depth = (as_int(sch.get(l).extent) for l in (g, m, j, k))
    assert width is not None
    assert depth is not None
    panels = width // panel

    macs = (groups or 4) * (height or 256) * width * depth
    threads = target.threads if macs >= MIN_PARALLEL_MACS else 1
    tiles = None if height is None else height // rows
    row_chunks, panel_chunks = _chunks(groups, tiles, panels, panel, depth, threads, target, "pack_b" in packs)

    flatten_sink(sch, sink, anchor)
    if tiles is None:
        m0 = None
        m1, m2 = sch.split(m, [None, rows])
    else:
        m0, m1, m2 = perfect(sch, m, [row_chunks, tiles // row_chunks, rows])
    j0, j1, j2 = perfect(sch, j, [panel_chunks, panels // panel_chunks, panel], innermost=panel)
    outer = [l for l in (g, m0, j0) if l is not None]
    sch.reorder(*outer, m1, j1, k, m2, j2)
    sch.reverse_compute_at(sink.rv, j1, preserve_unit_loops=True)
    sch.split(j2, [None, lanes])  # after the sink has its place: a tile that lanes do not divide is rounded up here
    sch.set_scope(block, 0, "local")
    in_group = "pack_b" in packs and ((threads == 1 and groups != 1) or groups is None or groups >= 4 * threads)
    if "pack_b" in packs:
        _pack_b(sch, packs["pack_b"], g if in_group else None, threads, lanes)
    if "pack_a" in packs:
        sch.compute_at(packs["pack_a"].rv, m1, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(packs["pack_a"].rv)[-1]) if not _guarded_columns(packs["pack_a"]) else None
    if _ragged(sink, panel):
        sch.annotate(j1, PARTITION_HINT, 1)
    if threads > 1:
        if in_group:  # the packing lies between the group's loop and the others: they cannot be fused
            sch.parallel(g)
        else:
            sch.parallel(sch.fuse(*outer) if m0 is not None else sch.fuse(g, j0, m1))
    tile = sch.get_loops(block)[-3:]
    sch.vectorize(tile[-1])
    sch.unroll(tile[0])
    sch.unroll(tile[1])
    init = sch.decompose_reduction(block, k)
    loops = sch.get_loops(init)
    sch.vectorize(loops[-1])
    for loop in loops[-3:-1]:
        sch.unroll(loop)
    _finish(sch, sink, lanes)


def _chunks(
    groups: int | None,
    tiles: int | None,
    panels: int,
    panel: int,
    depth: int,
    threads: int,
    target: Target,
    packed: bool,
) -> tuple[int, int]:
    """(row chunks, panel chunks): each chunk of panels fits half of L2, all chunks together occupy the threads."""
    fit = max(1, target.l2_bytes // 2 // (panel * depth * BYTES))
    smallest = min((d for d in divisors(panels) if panels // d <= fit), default=panels)
    if threads == 1 or (groups or 0) >= 4 * threads:
        return 1, smallest
    rows = divisors(tiles) if tiles is not None else [1]
    pairs = [(r, c) for r in rows for c in divisors(panels) if c % smallest == 0]
    ideal = max(smallest, 2 * threads)
    return split_parallel(pairs, threads, ideal)


def _pack_b(sch: Any, pack: Info, group: Any | None, threads: int, lanes: int) -> None:
    """B is packed when its group (the loop `group`) starts; None: all of B first, in parallel, for groups are few."""
    if group is not None:
        sch.compute_at(pack.rv, group, preserve_unit_loops=True)
        loops = sch.get_loops(pack.rv)
    else:
        loops = sch.get_loops(pack.rv)
        if threads > 1:
            loops = [sch.fuse(*loops[:2]), *loops[2:]]
            sch.parallel(loops[0])
    info = inspect(sch, pack.rv)
    if not _has_condition(info):
        vectorize_loop(sch, loops[-1], lanes)


def _has_condition(info: Info) -> bool:
    from tvmx_schedules.cpu.loops import has_varying_condition

    return has_varying_condition(info, lambda _: True)


def _guarded_columns(info: Info) -> bool:
    from tvmx_schedules.cpu.blocks import uses
    from tvmx_schedules.cpu.loops import has_varying_condition

    column = info.block.iter_vars[-1].var
    return has_varying_condition(info, lambda e: uses(e, column))


def _inline_epilogue(sch: Any, anchor: Info) -> Info:
    """Inline everything around the product but the packing blocks and the last block.

    Raises ValueError for a function with several outputs.
    """
    infos = leaves(sch)
    position = next(i for i, info in enumerate(infos) if info.name == anchor.name)
    before = [i for i in infos[:position] if i.name not in ("pack_a", "pack_b")]
    after = infos[position + 1 :]
    sinks = [i for i in after if not sch.get_consumers(i.rv)]
    if len(sinks) != 1:
        raise ValueError(f"a matrix product with {len(sinks)} output blocks")
    for info in (*before, *after):
        if info.name != sinks[0].name:
            sch.compute_inline(info.rv)
    return inspect(sch, sinks[0].rv)


def flatten_sink(sch: Any, sink: Info, anchor: Info) -> None:
    """The output's dims (..., row, n) → (group, row, n), so that a tile of C is a rectangle of the output."""
    from tvm.tirx import IndexMap, const

    shape = [as_int(e) if as_int(e) is not None else e for e in (v.dom.extent for v in sink.block.iter_vars)]
    one_group = as_int(anchor.block.iter_vars[0].dom.extent) == 1

    def flat(*index: Any) -> tuple[Any, ...]:
        lead: Any = 0
        dims = index[:-1] if one_group else index[:-2]
        for i, extent in zip(dims, shape):
            lead = lead * extent + i
        return (const(0, index[-1].ty.dtype), lead, index[-1]) if one_group else (lead, index[-2], index[-1])

    if len(shape) != 3 or (one_group and shape[0] != 1):
        sch.transform_block_layout(sink.rv, IndexMap.from_func(flat, ndim=len(shape)))


def _ragged(sink: Info, panel: int) -> bool:
    n = as_int(sink.block.iter_vars[-1].dom.extent)
    return n is not None and n % panel != 0


def _finish(sch: Any, sink: Info, lanes: int) -> None:
    """Vectorise the epilogue's columns, unroll its rows."""
    loops = sch.get_loops(sink.rv)
    columns = loops[-1]
    rows = loops[-2]
    vectorize_loop(sch, columns, lanes)
    if as_int(sch.get(rows).extent) is not None:
        sch.unroll(rows)
