"""Scheduled TensorIR on the CPU with all GPU threads in turn: what a schedule computes, tensorised or not.

Thread bindings and vector loops become serial loops, every scope ordinary memory, and LLVM compiles the rest. It
knows nothing of lanes, barriers or the CUDA source: that is `emulate`. It serves schedules before tensorisation,
whose fragments do not compile for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmx.errors import CompileError


def run_serial(func: Any, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run a scheduled PrimFunc without tensor intrinsics; `inputs` are its first tensor parameters, the others outputs.

    Raises CompileError when it does not compile (it calls GPU intrinsics).
    """
    import tvm

    mod = tvm.IRModule({"main": _serial(func).with_attr("global_symbol", "main")})
    try:
        built = tvm.compile(mod, tvm.target.Target("llvm"))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:]
        raise CompileError(f"this schedule does not run serially, emulate it instead: {reason}") from error
    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    outputs = [tvm.runtime.tensor(np.zeros([int(e) for e in b.shape], str(b.dtype))) for b in buffers[len(inputs) :]]
    built["main"](*[tvm.runtime.tensor(a) for a in inputs], *outputs)
    return tuple(o.numpy() for o in outputs)


def _serial(func: Any) -> Any:
    import tvm_ffi
    from tvm import tirx
    from tvm.ir.type import PointerType
    from tvm.s_tir import SBlock
    from tvm.tirx.buffer import BufferType

    def loop(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return tirx.For(node.loop_var, node.min, node.extent, tirx.ForKind.SERIAL, node.body, None, {}, node.step)

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return SBlock(
            node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init, node.alloc_buffers,
            node.match_buffers, {}, node.span,
        )  # fmt: skip

    def buffer(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.storage_scope in ("", "global"):
            return node
        return BufferType(
            dtype=node.dtype, shape=node.shape, strides=node.strides, elem_offset=node.elem_offset,
            storage_scope="global", span=node.span, data_alignment=node.data_alignment,
            offset_factor=node.offset_factor, layout=node.layout, allocated_addr=node.allocated_addr,
        )  # fmt: skip

    def pointer(node: Any, mutator: Any) -> Any:
        return PointerType(node.element_type, "") if node.storage_scope else node

    rules = [(tirx.For, loop), (SBlock, block), (BufferType, buffer), (PointerType, pointer)]
    return tvm_ffi.structural_mutate(func, rules)
