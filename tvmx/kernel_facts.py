"""What the executor must know of an unscheduled kernel: what may be done in place, its FLOPs, its name for people."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

from tvmx.graph import Moves
from tvmx.kernel_moves import kernel_moves


@dataclass(frozen=True)
class KernelFacts:
    """Facts about one PrimFunc; `inplace` is as in `tvmx.graph.Node`, indices count tensor parameters only."""

    inplace: tuple[tuple[int, int], ...]
    flops: int
    op: str
    moves: Moves | None = None


def kernel_facts(func: Any, name: str, n_inputs: int) -> KernelFacts:
    """Read an unscheduled PrimFunc whose first `n_inputs` buffer parameters are inputs, the others outputs."""
    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    blocks = _leaf_blocks(func)
    return KernelFacts(
        _inplace(blocks, buffers[:n_inputs], buffers[n_inputs:]),
        sum(b.flops for b in blocks if b is not None),
        readable_op(name),
        kernel_moves(func, n_inputs),
    )


@dataclass(frozen=True)
class _Block:
    """`writes` is the buffer written at `index`, the block's own iteration variables in order; else it is None."""

    writes: Any
    reads: tuple[tuple[Any, bool], ...]  # (buffer, read only at the very element that is written)
    flops: int


def _leaf_blocks(func: Any) -> list[_Block | None]:
    """Every block that computes, in program order; None for one that is more than loads, arithmetic and a store."""
    from tvm.s_tir import SBlock

    from tvmx.schedule.tir import walk

    found: list[_Block | None] = []

    def visit(block: Any) -> None:
        if block.name_hint != "root" or block.iter_vars:
            found.append(_read_block(block))

    walk(func, SBlock, visit)
    return found


def _read_block(block: Any) -> _Block | None:
    import tvm
    from tvm.ir import Call
    from tvm.ir.expr import TensorLoad
    from tvm.tirx import BufferStore

    from tvmx.schedule.tir import walk

    if block.match_buffers or block.alloc_buffers:
        return None
    stores: list[Any] = []
    loads: list[Any] = []
    multiplies: list[Any] = []
    opaque: list[Any] = []
    walk(block.body, BufferStore, stores.append)
    walk(block.body, TensorLoad, loads.append)
    walk(block.body, tvm.tirx.Mul, multiplies.append)
    walk(block.body, Call, lambda c: opaque.append(c) if _touches_memory(c) else None)
    if len(stores) != 1 or opaque:
        return None
    if block.init is not None:
        walk(block.init, TensorLoad, loads.append)
    store = stores[0]
    extents = [v.dom.extent for v in block.iter_vars]
    iterations = math.prod(int(getattr(e, "value", 0)) for e in extents)
    reduces = any(int(v.iter_type) == 2 for v in block.iter_vars)
    is_float = "float" in str(store.buffer.dtype)
    flops = iterations * (2 if reduces and multiplies else 1) if is_float or reduces else 0
    if not multiplies and not reduces and _is_copy(store.value):
        flops = 0
    own = [v.var for v in block.iter_vars]
    writes_own = (
        not reduces
        and block.init is None
        and len(store.indices) == len(own)
        and all(_is_var_or_only(i, v) for i, v in zip(store.indices, block.iter_vars))
    )
    reads = tuple((load.source, writes_own and _same(load.indices, store.indices)) for load in loads)
    return _Block(store.buffer, reads, flops)


def _is_copy(value: Any) -> bool:
    return hasattr(value, "source") and hasattr(value, "indices")


def _touches_memory(call: Any) -> bool:
    """Calls that may read or write memory that loads and stores do not show."""
    name = getattr(call.op, "name", "")
    return name in ("tirx.address_of", "tirx.tvm_access_ptr", "tirx.call_packed", "tirx.call_cpacked") or (
        not hasattr(call.op, "name")
    )


def _is_var_or_only(index: Any, iter_var: Any) -> bool:
    """The index is the iteration variable, or the only index there is."""
    if index.same_as(iter_var.var):
        return True
    extent = iter_var.dom.extent
    return getattr(extent, "value", None) == 1 and getattr(index, "value", None) == 0


def _same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        a.same_as(b)
        or (getattr(a, "value", None) is not None and getattr(a, "value", None) == getattr(b, "value", None))
        for a, b in zip(left, right)
    )


def _inplace(blocks: list[_Block | None], inputs: list[Any], outputs: list[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs (output, input) where every use of the input flows to that output alone, element by element.

    Every transitive use must be element-wise, since a schedule may inline any block into its readers.
    """
    if any(b is None for b in blocks):
        return ()
    pairs = []
    for i, source in enumerate(inputs):
        target = _elementwise_sink(source, [b for b in blocks if b is not None], outputs)
        if target is not None and _alike(source, outputs[target]):
            pairs.append((target, i))
    return tuple(pairs)


def _elementwise_sink(source: Any, blocks: list[_Block], outputs: list[Any]) -> int | None:
    """Index of the only output that `source` flows to, if it does so element by element."""
    derived, sinks, grew = [source], set(), True
    while grew:
        grew = False
        for block in blocks:
            for buffer, own_element in block.reads:
                if not any(buffer.same_as(d) for d in derived):
                    continue
                if not own_element:
                    return None
                if not any(block.writes.same_as(d) for d in derived):
                    derived.append(block.writes)
                    grew = True
    for index, output in enumerate(outputs):
        if any(output.same_as(d) for d in derived):
            sinks.add(index)
    # An output read again as an intermediate would be read after it overwrote the input: still element-wise.
    return sinks.pop() if len(sinks) == 1 else None


def _alike(a: Any, b: Any) -> bool:
    """Same shape and same bytes per element."""
    import tvm
    from tvm.sym import Analyzer

    if tvm.DataType(str(a.dtype)).bits != tvm.DataType(str(b.dtype)).bits or len(a.shape) != len(b.shape):
        return False
    analyzer = Analyzer()
    for x, y in zip(a.shape, b.shape):
        if getattr(x, "value", None) is not None or getattr(y, "value", None) is not None:
            if getattr(x, "value", None) != getattr(y, "value", None):
                return False
        elif not (x.same_as(y) or analyzer.can_prove_equal(x, y)):
            return False
    return True


@functools.cache
def _operator_names() -> tuple[frozenset[str], int]:
    """Last parts of Relax's operator names ("conv2d", "layer_norm"), and how many words the longest has."""
    import tvm

    names = {n.rpartition(".")[2] for n in tvm.ir.Op.list_op_names() if n.startswith("relax.")}
    return frozenset(names), max(n.count("_") + 1 for n in names)


def readable_op(kernel: str) -> str:
    """`fused_conv2d1_add_relu2` → `conv2d+add+relu`: FuseTIR joins the names of what it fused."""
    known, longest = _operator_names()
    # TVM names some scalar functions tir_sigmoid and so on: the prefix says nothing.
    words = [w for w in kernel.removeprefix("fused_").split("_") if w != "tir"]
    parts: list[str] = []
    at = 0
    while at < len(words):
        if parts and re.fullmatch(r"\d+x\d+", words[at]):
            parts[-1] += f"_{words[at]}"  # conv2d_1x1
            at += 1
            continue
        for count in range(min(longest, len(words) - at), 0, -1):
            text = "_".join(words[at : at + count])
            # A number at the end tells equal names apart; "conv2d" keeps its own.
            bare = text if text in known else re.sub(r"\d+$", "", text)
            if bare in known or count == 1:
                if bare:
                    parts.append(bare)
                at += count
                break
    return "+".join(parts) or kernel
