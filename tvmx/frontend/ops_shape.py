"""Converters that move elements without computing: reshape, slice, concat, pad, gather and kin."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from onnx import helper
from tvm import relax, te, tirx
from tvm.relax import op as R

from tvmx.frontend import float8
from tvmx.frontend.node import Expr, Node, constant, converter, dtype_of, np_dtype, simplify


def product(dims: Any) -> Any:
    total: Any = 1
    for d in dims:
        total = total * d
    return simplify(total)


def const_of(x: Expr) -> np.ndarray | None:
    return x.value.numpy() if isinstance(x, tvm.ir.GenericConst) else None


def reshape(node: Node, x: Expr, dims: list[Any]) -> Expr:
    """x with new dims; constants are reshaped now, and a reshape to the same dims is none."""
    if [simplify(d) for d in node.dims(x)] == dims:
        return x
    array = const_of(x)
    if all(isinstance(d, int) for d in dims):
        if array is not None:
            return constant(array.reshape(dims))
        if 0 in dims:  # which Relax would take for "copy this dim"
            return node.emit(constant(np.zeros(dims, np_dtype(dtype_of(x)))))
    return node.emit(R.reshape(x, dims))


@converter("Identity")
def identity(node: Node) -> Expr:
    return node[0]


@converter("Reshape")
def reshape_op(node: Node) -> Expr:
    if node.opset < 5:
        target: list[Any] = list(node.attrs["shape"])
    else:
        target = [simplify(v) for v in node.known(1, "the target shape").reshape(-1)]
    dims = node.shape(0)
    if not node.attr("allowzero", 0):
        target = [dims[i] if isinstance(d, int) and d == 0 else d for i, d in enumerate(target)]
    minus = [i for i, d in enumerate(target) if isinstance(d, int) and d == -1]
    if len(minus) > 1:
        raise node.fail(f"the target shape {target} has more than one -1")
    total = product(dims)
    if minus:
        rest = product([d for i, d in enumerate(target) if i != minus[0]])
        if isinstance(total, int) and isinstance(rest, int):
            if rest == 0 or total % rest:
                raise node.fail(f"{total} elements of shape {dims} do not fit into {target}")
            target[minus[0]] = total // rest
        else:
            target[minus[0]] = simplify(tirx.floordiv(total, rest))
    elif isinstance(total, int) and isinstance(product(target), int) and total != product(target):
        raise node.fail(f"{total} elements of shape {dims} do not fit into {target}")
    return reshape(node, node[0], target)


@converter("Flatten")
def flatten(node: Node) -> Expr:
    dims = node.shape(0)
    axis = node.attr("axis", 1)
    if not -len(dims) <= axis <= len(dims):
        raise node.fail(f"axis {axis} is out of range for rank {len(dims)}")
    axis = axis + len(dims) if axis < 0 else axis
    return reshape(node, node[0], [product(dims[:axis]), product(dims[axis:])])


def axes_of(node: Node, i: int = 1) -> list[int] | None:
    """Axes from input i (newer opsets) or from the attribute."""
    if node.has(i):
        return node.known_ints(i, "axes")
    axes = node.attr("axes")
    return None if axes is None else list(axes)


@converter("Squeeze")
def squeeze(node: Node) -> Expr:
    dims = node.shape(0)
    axes = axes_of(node)
    if axes is None:
        gone = {i for i, d in enumerate(dims) if isinstance(d, int) and d == 1}
    else:
        gone = {node.axis(a, len(dims)) for a in axes}
        for a in gone:
            if isinstance(dims[a], int) and dims[a] != 1:
                raise node.fail(f"axis {a} has size {dims[a]}, only 1 can be squeezed")
    return reshape(node, node[0], [d for i, d in enumerate(dims) if i not in gone])


@converter("Unsqueeze")
def unsqueeze(node: Node) -> Expr:
    axes = axes_of(node)
    if axes is None:
        raise node.fail("axes are missing")
    dims = node.shape(0)
    rank = len(dims) + len(axes)
    where = {node.axis(a, rank) for a in axes}
    if len(where) != len(axes):
        raise node.fail(f"axes {axes} name one axis twice")
    rest = iter(dims)
    return reshape(node, node[0], [1 if i in where else next(rest) for i in range(rank)])


@converter("Transpose")
def transpose(node: Node) -> Expr:
    rank = node.rank(0)
    perm = list(node.attr("perm", range(rank)[::-1]))
    if sorted(perm) != list(range(rank)):
        raise node.fail(f"perm {perm} is no permutation of {rank} axes")
    if perm == list(range(rank)):
        return node[0]
    array = const_of(node[0])
    if array is not None:
        return constant(np.ascontiguousarray(array.transpose(perm)))
    return node.emit(R.permute_dims(node[0], perm))


@converter("Concat")
def concat(node: Node) -> Expr:
    parts = [node[i] for i in range(len(node))]
    rank = node.rank(0)
    axis = node.axis(node.attr("axis", 1), rank)
    kept = [p for p in parts if node.dims(p)[axis] != 0] or parts[:1]
    if len(kept) == 1:
        return kept[0]
    arrays = [const_of(p) for p in kept]
    if all(a is not None for a in arrays):
        return constant(np.concatenate(arrays, axis=axis))  # type: ignore[arg-type]
    return node.emit(R.concat(kept, axis))


@converter("Split")
def split(node: Node) -> list[Expr]:
    dims = node.shape(0)
    axis = node.axis(node.attr("axis", 0), len(dims))
    if node.has(1):
        sizes = node.known_ints(1, "the split sizes")
    elif node.attr("split"):
        sizes = list(node.attrs["split"])
    else:
        parts = node.attr("num_outputs", node.num_outputs)
        size = dims[axis]
        if not isinstance(size, int):
            raise node.fail(f"cannot split the symbolic dim {size} evenly; fix it with --shape")
        step = -(-size // parts)
        sizes = [min(step, size - k * step) for k in range(parts)]
    if any(isinstance(s, int) and s < 0 for s in sizes):
        raise node.fail(f"split sizes {sizes} must not be negative")
    if isinstance(dims[axis], int) and sum(sizes) != dims[axis]:
        raise node.fail(f"split sizes {sizes} do not add up to {dims[axis]}")
    if len(sizes) == 1:
        return [node[0]]
    array = const_of(node[0])
    bounds = [int(b) for b in np.cumsum(sizes)[:-1]]
    if array is not None:
        return [constant(np.ascontiguousarray(a)) for a in np.split(array, bounds, axis)]
    if 0 in sizes:
        # relax.split refuses empty parts.
        out, start = [], 0
        for s in sizes:
            out.append(
                node.emit(R.strided_slice(node[0], [axis], [start], [start + s], [1]))
                if s
                else node.const(np.zeros([0 if i == axis else d for i, d in enumerate(dims)]), node.dtype(0))
            )
            start += s
        return out
    result = node.emit(R.split(node[0], bounds, axis))
    return [node.emit(relax.TupleGetItem(result, k)) for k in range(len(sizes))]


def _slice_params(node: Node) -> tuple[list[Any], list[Any], list[int], list[int]]:
    if node.opset < 10:
        starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
        axes = list(node.attr("axes", range(len(starts))))
        return starts, ends, axes, [1] * len(starts)
    starts = [simplify(v) for v in node.known(1, "starts").reshape(-1)]
    ends = [simplify(v) for v in node.known(2, "ends").reshape(-1)]
    axes = node.known_ints(3, "axes") if node.has(3) else list(range(len(starts)))
    steps = node.known_ints(4, "steps") if node.has(4) else [1] * len(starts)
    return starts, ends, axes, steps


@converter("Slice")
def slice_op(node: Node) -> Expr:
    dims = node.shape(0)
    starts, ends, axes, steps = _slice_params(node)
    axes = [node.axis(a, len(dims)) for a in axes]
    begin, finish, stride = [0] * len(dims), list(dims), [1] * len(dims)
    out = list(dims)
    for s, e, a, st in zip(starts, ends, axes, steps):
        if st == 0:
            raise node.fail("a step of 0")
        lo, hi = _clamp(s, e, st, dims[a])
        begin[a], finish[a], stride[a] = lo, hi, st
        if isinstance(lo, int) and isinstance(hi, int):
            out[a] = len(range(lo, hi, st))
        elif st == 1:
            out[a] = simplify(hi - lo)
        elif st > 0:
            out[a] = simplify(tirx.floordiv(hi - lo + (st - 1), st))
        else:
            out[a] = simplify(tirx.floordiv(lo - hi + (-st - 1), -st))
    if all(isinstance(b, int) and b == 0 for b in begin) and out == dims and max(stride) == 1 == min(stride):
        return node[0]
    array = const_of(node[0])
    if array is not None and all(isinstance(v, int) for v in (*begin, *finish)):
        index = tuple(slice(b, f if f >= 0 else None, s) for b, f, s in zip(begin, finish, stride))
        return constant(np.ascontiguousarray(array[index]))
    if any(isinstance(d, int) and d == 0 for d in out):
        return node.const(np.zeros(out), node.dtype(0))
    if min(stride) > 0 and all(isinstance(v, int) for v in (*begin, *finish)):
        used = [i for i in range(len(dims)) if (begin[i], stride[i]) != (0, 1) or out[i] != dims[i]]
        return node.emit(
            R.strided_slice(
                node[0], used, [begin[i] for i in used], [finish[i] for i in used],
                [stride[i] for i in used],
            )
        )  # fmt: skip

    def kernel(x: Any, first: Any, extent: Any) -> Any:
        first = list(first)
        return te.compute(tuple(extent), lambda *i: x(*(f + k * s for k, f, s in zip(i, first, stride))), name="slice")

    return node.te(kernel, node[0], as_exprs(begin), as_exprs(out))


def as_exprs(dims: list[Any]) -> list[Any]:
    return [tirx.const(d, "int64") if isinstance(d, int) else d for d in dims]


def _clamp(start: Any, end: Any, step: int, size: Any) -> tuple[Any, Any]:
    """First element and exclusive end of an ONNX slice, both inside the axis."""
    if isinstance(start, int) and isinstance(end, int) and isinstance(size, int):
        start = start + size if start < 0 else start
        end = end + size if end < 0 else end
        if step > 0:
            start, end = min(max(start, 0), size), min(max(end, 0), size)
            return start, max(end, start)
        start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
        return start, min(end, start)
    huge = 2**31 - 2

    def place(v: Any, low: Any, high: Any) -> Any:
        if isinstance(v, int):
            if v >= huge:
                return high
            if v <= -huge:
                return low
            if v == 0:
                return 0
            if v < 0:
                return simplify(tirx.max(size + v, low))
            return simplify(tirx.min(tirx.const(v, "int64"), high))
        v = tirx.Select(v < 0, v + size, v)
        return simplify(tirx.max(tirx.min(v, high), low))

    if step > 0:
        lo = place(start, 0, size)
        hi = place(end, 0, size)
        return lo, hi if isinstance(lo, int) and lo == 0 else simplify(tirx.max(hi, lo))
    lo = place(start, 0, size - 1)
    hi = place(end, -1, size - 1)
    return simplify(lo), simplify(hi)


@converter("Expand")
def expand(node: Node) -> Expr:
    target = [simplify(v) for v in node.known(1, "the target shape").reshape(-1)]
    return broadcast_to(node, node[0], broadcast_dims(node, [node.shape(0), target]))


def broadcast_dims(node: Node, shapes: list[list[Any]]) -> list[Any]:
    """The common shape of numpy broadcasting; a symbolic dim meets an equal one or 1."""
    rank = max(len(s) for s in shapes)
    out: list[Any] = [1] * rank
    for shape in shapes:
        for i, d in enumerate(shape, rank - len(shape)):
            have = out[i]
            if isinstance(d, int) and d == 1:
                continue
            if isinstance(have, int) and have == 1:
                out[i] = d
            elif isinstance(have, int) and isinstance(d, int):
                if have != d:
                    raise node.fail(f"shapes {shapes} do not broadcast")
            elif isinstance(d, int):
                out[i] = d  # a symbolic dim must then equal the fixed one
    return out


def broadcast_to(node: Node, x: Expr, dims: list[Any]) -> Expr:
    if node.dims(x) == dims:
        return x
    return node.emit(R.broadcast_to(x, dims))


@converter("Tile")
def tile(node: Node) -> Expr:
    if node.opset < 6:
        raise node.fail("Tile before opset 6 is not supported; re-export with a newer opset")
    repeats = node.known_ints(1, "repeats")
    if all(r == 1 for r in repeats):
        return node[0]
    dims = node.shape(0)
    if any(isinstance(d, int) and d * r == 0 for d, r in zip(dims, repeats)):
        return node.const(np.zeros([d * r for d, r in zip(dims, repeats)]), node.dtype(0))
    # A broadcast over new axes rather than indices modulo the sizes: nothing is divided, and LLVM 22 miscompiles
    # vectors of such remainders for AVX-512.
    split = [part for d in dims for part in (1, d)]
    wide = [part for d, r in zip(dims, repeats) for part in (r, d)]
    copies = node.emit(R.broadcast_to(reshape(node, node[0], split), wide))
    return reshape(node, copies, [simplify(d * r) for d, r in zip(dims, repeats)])


@converter("ConstantOfShape")
def constant_of_shape(node: Node) -> Expr:
    dims = [simplify(v) for v in node.known(0, "the shape").reshape(-1)]
    value = np.asarray(node.attr("value", np.zeros(1, np.float32))).reshape(-1)[0]
    scalar = constant(np.asarray(value))
    if all(isinstance(d, int) for d in dims) and np.prod(dims) < 1 << 20:
        return constant(np.full(dims, value))
    return node.emit(R.full(relax.ShapeExpr(as_exprs(dims)), scalar, str(value.dtype)))


@converter("Range")
def range_op(node: Node) -> Expr:
    start, limit, delta = (node.known(i, w).reshape(-1)[0] for i, w in enumerate(("start", "limit", "delta")))
    dtype = node.dtype(0)
    count = simplify(tirx.floordiv(limit - start + (delta - 1), delta))

    def kernel(first: Any, n: Any) -> Any:
        return te.compute((n,), lambda i: tirx.Cast(dtype, first + i * int(delta)), name="range")

    first = tirx.const(int(start), "int64") if not hasattr(start, "ty") else start
    n = tirx.const(count, "int64") if isinstance(count, int) else count
    return node.te(kernel, first, n)


def cast(node: Node, x: Expr, to: str, saturate: bool = True) -> Expr:
    """x as dtype `to`, with ONNX's (numpy's) rules: non-zero is true, floats truncate."""
    have = dtype_of(x)
    if have == to:
        return x
    for dtype in (have, to):
        if dtype in UNSUPPORTED_DTYPES:
            raise node.fail(f"type {dtype} is not supported; keep such values as int8 or float32")
    if have in float8.FLOAT8:
        wide = to if to in ("float32", "float64", "float16", "bfloat16") else "float32"
        return cast(node, float8.decode(node, x, wide), to)
    if to in float8.FLOAT8:
        return float8.encode(node, cast(node, x, "float32"), to, saturate)
    array = const_of(x)
    # Codes of 8-bit weights stay codes: the passes see from the cast what they are.
    limit = 256 if have in ("int8", "uint8") else 1 << 16
    if array is not None and array.size <= limit and to in ("float32", "int64", "int32"):
        with np.errstate(all="ignore"):
            return constant(array.astype(to))
    if to == "bool":
        return node.emit(R.not_equal(x, node.const(0, have)))
    return node.emit(R.astype(x, to))


# Types below a byte live packed in memory, which no kernel of ours addresses; of the 8-bit floats
# the scale-only one has neither sign nor zero.
UNSUPPORTED_DTYPES = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e8m0fnu")


@converter("Cast")
def cast_op(node: Node) -> Expr:
    to = str(helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    return cast(node, node[0], to, bool(node.attr("saturate", 1)))


@converter("CastLike")
def cast_like(node: Node) -> Expr:
    return cast(node, node[0], node.dtype(1), bool(node.attr("saturate", 1)))
