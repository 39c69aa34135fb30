"""Vector loops over bool tensors become unrolled ones.

TVM's CUDA code gives a lane of a bool vector two bytes, not one, and so reads and writes beyond the tensor.
"""

from __future__ import annotations

from typing import Any


def unroll_bool_vectors() -> Any:
    """The pass; to run before VectorizeLoop."""
    import tvm_ffi
    from tvm import tirx

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        return func.with_body(tvm_ffi.structural_mutate(func.body, [(tirx.For, _loop)]))

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tvmx.UnrollBoolVectors")


def _loop(loop: Any, mutator: Any) -> Any:
    from tvm import tirx

    loop = mutator.default_mutate(loop)
    if int(loop.kind) != int(tirx.ForKind.VECTORIZED) or not _touches_bool(loop.body):
        return loop
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body, None, loop.annotations, loop.step
    )


def _touches_bool(body: Any) -> bool:
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

    from tvmx.schedule.tir import walk

    found: list[str] = []
    walk(body, TensorLoad, lambda load: found.append(str(load.source.dtype)))
    walk(body, tirx.BufferStore, lambda store: found.append(str(store.buffer.dtype)))
    return "bool" in found
