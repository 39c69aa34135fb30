"""Everything that is no Tensor Core product: element-wise kernels of our own, reductions by DLight.

cuda.elementwise  one pass over the output, 16 bytes a thread where every tensor is read along it
cuda.dlight       reductions, norms, softmax, pooling, depthwise: the first DLight rule that takes the kernel; its
                  fallback gives every output element a thread
"""

from __future__ import annotations

from typing import Any

from tvmx_schedules.cpu.blocks import SPATIAL, Info, as_int, inspect, leaves, stride

from tvmx.schedule import Workload, schedule_rule
from tvmx.target import Target

THREADS = 256


def _elementwise(workload: Workload) -> bool:
    return workload.is_static and bool(workload.blocks) and not any(b.reduction for b in workload.blocks)


@schedule_rule("cuda.elementwise", match=_elementwise, when=lambda t: t.kind == "cuda", priority=-50)
def elementwise(sch: Any, target: Target) -> None:
    """Inline everything into the last block; fuse its loops over vectors, threads and blocks.

    Raises ValueError for several outputs, or blocks that are more than one store.
    """
    infos = leaves(sch)
    sinks = [i for i in infos if not sch.get_consumers(i.rv)]
    if len(sinks) != 1 or any(not i.is_plain or any(k != SPATIAL for k in i.iter_kinds) for i in infos):
        raise ValueError("not one element-wise output")
    for info in infos:
        if info.name != sinks[0].name:
            sch.compute_inline(info.rv)
    sink = inspect(sch, sinks[0].rv)
    loops = sch.get_loops(sink.rv)
    if not loops:
        loops = [sch.add_unit_loop(sink.rv)]
    vector = vector_of(sink)
    fused = sch.fuse(*loops)
    size = as_int(sch.get(fused).extent) or 1
    threads = min(THREADS, max(32, -(-size // vector) // 32 * 32))
    count = sch.sample_categorical([64, 128, 256, 512], [0.25] * 4, decision=[64, 128, 256, 512].index(_near(threads)))
    block, thread, lanes = sch.split(fused, [None, count, vector])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lanes)


def _near(threads: int) -> int:
    return max(c for c in (64, 128, 256) if c <= max(64, threads))


def vector_of(info: Info) -> int:
    """Elements a thread may handle at a time: up to 16 bytes of the widest tensor, none of them read with a stride."""
    import tvm

    assert info.store is not None
    if not info.extents:
        return 1
    last = info.extents[-1] or 1
    var = info.block.iter_vars[-1].var
    widest = 1
    for access in (info.store, *info.loads):
        widest = max(widest, tvm.DataType(str(access.buffer.dtype)).bits // 8)
        if stride(access, var) not in (0, 1):
            return 1
    if stride(info.store, var) != 1 or _conditional(info):
        return 1
    vector = 16 // widest
    while vector > 1 and last % vector:
        vector //= 2
    return vector


def _conditional(info: Info) -> bool:
    """Is there a condition in the block that may differ from lane to lane?"""
    from tvm.ir import Call

    from tvmx.schedule.tir import walk

    found = False

    def visit(call: Any) -> None:
        nonlocal found
        found = found or getattr(call.op, "name", "") == "prim.if_then_else"

    walk(info.block.body, Call, visit)
    return found


@schedule_rule("cuda.dlight", match=lambda w: True, when=lambda t: t.kind == "cuda", priority=-100)
def dlight(sch: Any, target: Target) -> None:
    """The first of DLight's rules that takes the kernel, replayed on `sch`. Raises ValueError when none does."""
    from tvm.s_tir import dlight as dl

    func = sch.mod["main"].with_attr("global_symbol", "main")
    chosen = target.tvm()
    rules = (dl.gpu.Reduction(), dl.gpu.GeneralReduction(), dl.gpu.Fallback())
    for rule in rules:
        try:
            with chosen:
                made = rule.apply(func, chosen, False)
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, IndexError):
            continue
        if made is None:
            continue
        made = made[0] if isinstance(made, list) else made
        made.trace.apply_to_schedule(sch, remove_postproc=False)
        return
    raise ValueError("no DLight rule takes this kernel")
