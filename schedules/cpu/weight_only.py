"""Products by 8- and 4-bit weights on CPU: each panel of weights becomes floats once and serves all rows.

parallel (panels)
  [unpack_b]                  K × panel floats, in L2; a single tile of rows dequantises in registers instead
  tile of rows
    k                         accumulators in registers
      row (unrolled) × vector
    epilogue
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import inspect, leaves
from tvmx_schedules.cpu.conv_common import perfect
from tvmx_schedules.cpu.loops import vectorize_loop
from tvmx_schedules.cpu.matmul import flatten_sink

from tvmx.passes.legalize.conv_model import MIN_PARALLEL_MACS, tile_of_panel
from tvmx.schedule import schedule_rule
from tvmx.target import Target


@schedule_rule("cpu.weight_only", match=lambda w: w.op == "weight_only", when=lambda t: t.kind == "cpu")
def weight_only(sch: Any, target: Target) -> None:
    """C[0, m, j] over tiles of `tvmx.tile`."""
    infos = leaves(sch)
    anchor = next(i for i in infos if i.op == "weight_only")
    position = next(i for i, info in enumerate(infos) if info.name == anchor.name)
    sinks = [i for i in infos[position + 1 :] if not sch.get_consumers(i.rv)]
    if len(sinks) != 1:
        raise ValueError(f"a matrix product with {len(sinks)} output blocks")
    sink = sinks[0]
    for info in infos:
        if info.name not in (anchor.name, sink.name, "unpack_b"):
            sch.compute_inline(info.rv)
    rows, panel = (int(v) for v in anchor.block.annotations["tvmx.tile"])
    block, sink = anchor.rv, inspect(sch, sink.rv)
    _, lanes = tile_of_panel(panel, target)
    g, m, j, k = sch.get_loops(block)
    height, width, depth = (int(sch.get(l).extent) for l in (m, j, k))

    flatten_sink(sch, sink, anchor)
    m1, m2 = perfect(sch, m, [height // rows, rows])
    j1, j2 = perfect(sch, j, [width // panel, panel], innermost=panel)
    sch.reorder(g, j1, m1, k, m2, j2)
    sch.reverse_compute_at(sink.rv, m1, preserve_unit_loops=True)
    sch.split(j2, [None, lanes])  # after the sink has its place: a tile that lanes do not divide is rounded up here
    sch.set_scope(block, 0, "local")
    unpack = sch.get_sblock("unpack_b")
    if height == rows:
        sch.compute_inline(unpack)
    else:
        sch.compute_at(unpack, j1, preserve_unit_loops=True)
        vectorize_loop(sch, sch.get_loops(unpack)[-1], lanes)
    if target.threads > 1 and height * width * depth >= MIN_PARALLEL_MACS:
        sch.parallel(sch.fuse(g, j1))
    tile = sch.get_loops(block)[-3:]
    sch.vectorize(tile[-1])
    sch.unroll(tile[0])
    sch.unroll(tile[1])
    init = sch.decompose_reduction(block, k)
    loops = sch.get_loops(init)
    sch.vectorize(loops[-1])
    for loop in loops[-3:-1]:
        sch.unroll(loop)
    last = sch.get_loops(sink.rv)
    vectorize_loop(sch, last[-1], lanes)
    sch.unroll(last[-2])
