"""Kernels of the importer that only move elements (gathers with wrapped indices): the same kernel for another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvmx.passes.rewrite import op_name
from tvmx.schedule.tir import walk

Read = Callable[[Any, tuple[Any, ...]], Any]
"""(tensor, index) → the element that a moving kernel copies."""


def moving_kernel(mod: Any, call: Any) -> Callable[..., Any] | None:
    """For a call_tir whose kernel copies each result element from one float operand: the kernel as a TE function of
    the call's operands, of any dtype. None for every other call.
    """
    found = moved_operand(mod, call)
    return None if found is None else found[1]


def moved_operand(mod: Any, call: Any) -> tuple[int, Callable[..., Any]] | None:
    """(position of the operand whose elements the kernel copies, the kernel as `moving_kernel` gives it).

    The kernel takes `read=`, how an element of that operand is read, and then any tensors in its place.
    """
    from tvm import relax, tirx
    from tvm.ir import TensorLoad
    from tvm.s_tir import SBlock

    if op_name(call) != "call_tir" or len(call.args) != 2 or not isinstance(call.args[1], relax.Tuple):
        return None
    func = mod[call.args[0]]
    blocks: list[Any] = []
    walk(func, SBlock, lambda block: blocks.append(block) if block.iter_vars else None)
    if len(blocks) != 1 or not isinstance(blocks[0].body, tirx.BufferStore):
        return None
    store = blocks[0].body
    iterators = [v.var for v in blocks[0].iter_vars]
    params = list(func.params)
    in_order = len(store.indices) == len(iterators) and all(a.same_as(b) for a, b in zip(store.indices, iterators))
    copies = isinstance(store.value, TensorLoad) and any(store.value.source.same_as(p) for p in params[:-1])
    if (
        not in_order
        or not copies
        or not store.buffer.same_as(params[-1])
        or len(params) != len(call.args[1].fields) + 1
    ):
        return None

    moved = next(k for k, p in enumerate(params) if store.value.source.same_as(p))

    def kernel(*tensors: Any, read: Read | None = None) -> Any:
        from tvm import te

        def at(*index: Any) -> Any:
            variables, operands = list(zip(iterators, index)), list(zip(params, tensors))
            where = tuple(_with(i, variables, operands) for i in store.value.indices)
            return tensors[moved](*where) if read is None else read(tensors[moved], where)

        return te.compute(store.buffer.ty.shape, at, name=blocks[0].name_hint)

    return moved, kernel


def _with(expr: Any, indices: list[tuple[Any, Any]], tensors: list[tuple[Any, Any]]) -> Any:
    """`expr` over other iterators, reading TE tensors where it read buffers."""
    import tvm_ffi
    from tvm.ir import TensorLoad, Var

    def variable(var: Any, mutator: Any) -> Any:
        return next((new for old, new in indices if var.same_as(old)), var)

    def load(node: Any, mutator: Any) -> Any:
        tensor = next(new for old, new in tensors if node.source.same_as(old))
        return tensor(*[_with(i, indices, tensors) for i in node.indices])

    return tvm_ffi.structural_mutate(expr, [(TensorLoad, load), (Var, variable)])
