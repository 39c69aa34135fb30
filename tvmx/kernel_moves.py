"""Kernels that only move data which already lies in order: slices that are one run of bytes, and concatenations.

Read from the unscheduled PrimFunc and proved index by index; a kernel that is not recognised is simply run.
"""

from __future__ import annotations

from typing import Any

from tvmx.graph import Moves


def kernel_moves(func: Any, n_inputs: int) -> Moves | None:
    """What the kernel moves, when it does nothing else. Its first `n_inputs` buffers are inputs, the others outputs."""
    from tvm.sym import Analyzer

    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    inputs, outputs = buffers[:n_inputs], buffers[n_inputs:]
    copies = _copies(func)
    if copies is None or len(copies) != len(outputs):
        return None
    analyzer = Analyzer()
    slices = []
    for out in outputs:
        mine = [c for c in copies if c.target.same_as(out)]
        if len(mine) != 1:
            return None
        start = _run_of(mine[0], mine[0].value, inputs, analyzer)
        if start is None:
            break
        slices.append(start)
    if len(slices) == len(outputs):
        return Moves(slices=tuple(slices))
    joined = _joined(copies[0], inputs, analyzer) if len(outputs) == 1 else None
    return Moves(joined=joined) if joined else None


class _Copy:
    """`target[axes] = value`, once for every element."""

    def __init__(self, target: Any, axes: list[Any], value: Any) -> None:
        self.target = target
        self.axes = axes
        self.value = value


def _copies(func: Any) -> list[_Copy] | None:
    """The stores of a kernel that is nothing but loops over whole outputs; None for any other."""
    from tvm.s_tir import SBlock
    from tvm.tirx import BufferStore

    from tvmx.schedule.tir import walk

    blocks: list[Any] = []
    walk(func, SBlock, blocks.append)
    found = []
    for block in blocks:
        if block.name_hint == "root" and not block.iter_vars:
            if block.alloc_buffers or block.match_buffers:
                return None
            continue
        stores: list[Any] = []
        walk(block.body, BufferStore, stores.append)
        if block.alloc_buffers or block.match_buffers or block.init is not None or len(stores) != 1:
            return None
        store = stores[0]
        if not block.body.same_as(store) or not _covers(store, block.iter_vars):
            return None
        found.append(_Copy(store.buffer, [v.var for v in block.iter_vars], store.value))
    return found


def _covers(store: Any, iter_vars: Any) -> bool:
    """Every element is written at its own iteration: the indices are the axes, each as long as its dimension."""
    from tvm.sym import Analyzer

    analyzer = Analyzer()
    shape = store.buffer.shape
    return len(store.indices) == len(iter_vars) == len(shape) and all(
        index.same_as(v.var)
        and int(v.iter_type) == 0
        and analyzer.can_prove_equal(v.dom.min, 0)
        and analyzer.can_prove_equal(v.dom.extent, extent)
        for index, v, extent in zip(store.indices, iter_vars, shape)
    )


def _position(buffer: Any, inputs: list[Any]) -> int | None:
    return next((i for i, b in enumerate(inputs) if b.same_as(buffer)), None)


def _load(value: Any, rank: int, inputs: list[Any]) -> int | None:
    """Which input `value` is an element of, if it is one and has as many indices as the output."""
    if not hasattr(value, "source") or not hasattr(value, "indices") or len(value.indices) != rank:
        return None
    return _position(value.source, inputs)


def _run_of(copy: _Copy, value: Any, inputs: list[Any], analyzer: Any) -> tuple[int, int] | None:
    """(input, its first element) when the output is consecutive elements of an input.

    So it is when one axis is shifted, those within it are whole, and those around it have a single index.
    """
    source = _load(value, len(copy.axes), inputs)
    if source is None or str(inputs[source].dtype) != str(copy.target.dtype):
        return None
    held, wanted = inputs[source].shape, copy.target.shape
    start = 0
    whole = True  # every axis within this one is
    stride: int | None = 1  # elements of the input; None when symbolic
    for axis in reversed(range(len(wanted))):
        shift = _shift(value.indices[axis], copy.axes[axis], wanted[axis], analyzer)
        if shift is None or shift < 0:
            return None
        single = analyzer.can_prove_equal(wanted[axis], 1)
        if not whole and not single:
            return None
        if shift:
            if stride is None:
                return None
            start += shift * stride
        if not (shift == 0 and analyzer.can_prove_equal(held[axis], wanted[axis])):
            whole = False
        extent = getattr(held[axis], "value", None)
        stride = stride * int(extent) if stride is not None and extent is not None else None
    return source, start


def _shift(index: Any, axis: Any, extent: Any, analyzer: Any) -> int | None:
    """The constant c of an index `axis + c`; of any constant index where the axis has one element."""
    import tvm

    difference = analyzer.simplify(index - axis)
    if isinstance(difference, tvm.tirx.IntImm):
        return int(difference)
    if analyzer.can_prove_equal(extent, 1) and isinstance(index, tvm.tirx.IntImm):
        return int(index)
    return None


def _joined(copy: _Copy, inputs: list[Any], analyzer: Any) -> tuple[int, ...] | None:
    """The inputs that lie one after the other in the output, along the first axis that is longer than 1."""
    import tvm

    shape = copy.target.shape
    for axis in range(len(shape)):
        if not analyzer.can_prove_equal(shape[axis], 1):
            break
    else:
        return None
    parts: list[int] = []
    reached: Any = tvm.tirx.const(0, shape[axis].dtype if hasattr(shape[axis], "dtype") else "int64")

    def leaves(value: Any, low: Any, high: Any) -> bool:
        """Split [low, high) of the axis by the conditions on it, and check each piece."""
        nonlocal reached
        split = _split(value, copy.axes[axis], analyzer)
        if split is not None:
            at, first, second = split
            return leaves(first, low, at) and leaves(second, at, high)
        source = _load(value, len(shape), inputs)
        if source is None or str(inputs[source].dtype) != str(copy.target.dtype):
            return False
        held = inputs[source].shape
        for k, (index, var) in enumerate(zip(value.indices, copy.axes)):
            if k == axis:
                fits = analyzer.can_prove_equal(index, var - low) and analyzer.can_prove_equal(held[k], high - low)
            else:
                same = analyzer.can_prove_equal(index, var) or (
                    analyzer.can_prove_equal(shape[k], 1) and analyzer.can_prove_equal(index, 0)
                )
                fits = same and analyzer.can_prove_equal(held[k], shape[k])
            if not fits:
                return False
        # Pieces come in order, each beginning where the last one ended.
        if not analyzer.can_prove_equal(reached, low):
            return False
        reached = high
        parts.append(source)
        return True

    if not leaves(copy.value, reached, shape[axis]) or len(parts) < 2:
        return None
    return tuple(parts)


def _split(value: Any, axis: Any, analyzer: Any) -> tuple[Any, Any, Any] | None:
    """(at, value below, value from there on) of a choice by `at <= axis`, however it is written."""
    kind = type(value).__name__
    if kind == "Call" and getattr(value.op, "name", "").endswith(".if_then_else"):
        condition, then, otherwise = value.args
    elif kind == "Select":
        condition, then, otherwise = value.condition, value.true_value, value.false_value
    else:
        return None
    test = type(condition).__name__
    if test in ("LE", "GE"):  # at <= axis, perhaps as 0 <= axis - at
        low, high = (condition.a, condition.b) if test == "LE" else (condition.b, condition.a)
        at = _free_of(axis, axis - (high - low), analyzer)
        return None if at is None else (at, otherwise, then)
    if test in ("LT", "GT"):  # axis < at
        low, high = (condition.a, condition.b) if test == "LT" else (condition.b, condition.a)
        at = _free_of(axis, axis - (low - high), analyzer)
        return None if at is None else (at, then, otherwise)
    return None


def _free_of(axis: Any, expr: Any, analyzer: Any) -> Any | None:
    """`expr` simplified, if `axis` is gone from it."""
    from tvm.ir import Var

    from tvmx.schedule.tir import walk

    simple = analyzer.simplify(expr)
    found: list[Any] = []
    walk(simple, Var, found.append)
    return None if any(v.same_as(axis) for v in found) else simple
