"""Values known while importing: shape arithmetic over ints and symbolic dims.

Small tensors that depend only on shapes and constants are computed here with numpy. An entry may be
a tirx expression over symbolic dims, in which case the array has dtype object and holds int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper
from tvm import te, tirx

from tvmx.frontend.node import Expr, Node, constant, shape_of, simplify

# Larger results stay run-time tensors.
LIMIT = 4096

Fold = Callable[[Node, list[Any]], Any]
_FOLDS: dict[str, Fold] = {}


def _folds(*ops: str) -> Callable[[Fold], Fold]:
    def register(fn: Fold) -> Fold:
        for op in ops:
            _FOLDS[op] = fn
        return fn

    return register


def evaluate(node: Node) -> list[np.ndarray] | None:
    """Outputs of the node if they are known now, else None."""
    if node.domain:
        return None
    if node.op == "Constant":
        return [_constant(node)]
    if node.op in ("Shape", "Size"):
        return _shape(node)
    fold = _FOLDS.get(node.op)
    if fold is None or not node.proto.input:
        return None
    args: list[Any] = []
    for i in range(len(node)):
        value = node.static(i)
        if value is None and node.has(i):
            return None
        args.append(value)
    if sum(a.size for a in args if a is not None) > LIMIT:
        return None
    try:
        result = fold(node, args)
    except NotImplementedError:  # a symbolic value where only a number serves
        return None
    if result is None:
        return None
    results = result if isinstance(result, list) else [result]
    results = [_tidy(r) for r in results]
    return None if any(r.size > LIMIT for r in results) else results


def materialise(bb: Any, value: np.ndarray) -> Expr:
    """The value as a Relax tensor; symbolic entries become a kernel over the symbolic dims."""
    if value.dtype != object:
        return constant(value) if value.size else bb.emit(constant(value))
    flat = [tirx.const(v, "int64") if isinstance(v, int) else v for v in value.reshape(-1)]
    strides = [math.prod(value.shape[i + 1 :]) for i in range(value.ndim)]

    def kernel(vals: Any) -> Any:
        vals = list(vals)

        def at(*idx: Any) -> Any:
            linear = sum((i * s for i, s in zip(idx, strides)), tirx.const(0, "int64"))
            result = vals[-1]
            for k in range(len(vals) - 2, -1, -1):
                result = tirx.Select(linear == k, vals[k], result)
            return result

        return te.compute(value.shape, at, name="shape_value")

    return bb.emit_te(kernel, flat, primfunc_name_hint="shape_value")


def _tidy(value: Any) -> np.ndarray:
    """Simplify symbolic entries; an array that turns out to be numbers becomes int64."""
    array = np.asarray(value)
    if array.dtype != object:
        return array
    flat = [simplify(v) for v in array.reshape(-1)]
    out = np.empty(len(flat), dtype=object)
    out[:] = flat
    if all(isinstance(v, int) for v in flat):
        return out.astype(np.int64).reshape(array.shape)
    return out.reshape(array.shape)


def symbolic(value: np.ndarray) -> bool:
    return value.dtype == object


def _numbers_only(*args: Any) -> None:
    if any(a is not None and a.dtype == object for a in args):
        raise NotImplementedError


def _constant(node: Node) -> np.ndarray:
    for key, dtype in (
        ("value", None),
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if key in node.attrs:
            return np.asarray(node.attrs[key], dtype=dtype)
    raise node.fail(f"a constant of kind {sorted(node.attrs)} is not supported; only tensors are")


def _shape(node: Node) -> list[np.ndarray] | None:
    known = node.static(0)
    try:
        dims = list(known.shape) if known is not None else shape_of(node[0])
    except ValueError:
        return None
    out = np.empty(len(dims), dtype=object)
    out[:] = dims
    if node.op == "Size":
        total: Any = 1
        for d in dims:
            total = total * d
        result = np.empty((), dtype=object)
        result[()] = total
        return [_tidy(result)]
    start, end = node.attr("start", 0), node.attr("end", len(dims))
    rank = len(dims)
    start = max(0, min(rank, start + rank if start < 0 else start))
    end = max(0, min(rank, end + rank if end < 0 else end))
    return [_tidy(out[start:end]) if end > start else np.zeros((0,), np.int64)]


def _each(fn: Callable[..., Any], *args: np.ndarray) -> np.ndarray:
    """Element-wise over object arrays with broadcasting."""
    wide = np.broadcast_arrays(*args)
    out = np.empty(wide[0].shape, dtype=object)
    for idx in np.ndindex(*wide[0].shape):
        out[idx] = fn(*(_item(w[idx]) for w in wide))
    return out


def _item(v: Any) -> Any:
    return v.item() if isinstance(v, np.generic) else v


def _is_expr(*vs: Any) -> bool:
    return any(not isinstance(v, int | float | bool | np.generic) for v in vs)


def _int_div(a: Any, b: Any) -> Any:
    if _is_expr(a, b):
        # Shapes are not negative, where truncation and floor agree.
        return tirx.floordiv(a, b)
    return int(a / b) if abs(a) < 2**52 else -(-a // b) if (a < 0) != (b < 0) else a // b


@_folds("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max")
def _arith(node: Node, args: list[np.ndarray]) -> Any:
    op = node.op
    if any(symbolic(a) for a in args):
        if any(a.dtype.kind == "f" for a in args):
            raise NotImplementedError
        table: dict[str, Callable[[Any, Any], Any]] = {
            "Add": lambda a, b: a + b,
            "Sub": lambda a, b: a - b,
            "Mul": lambda a, b: a * b,
            "Div": _int_div,
            "Mod": lambda a, b: tirx.floormod(a, b) if _is_expr(a, b) else a % b,
            "Min": lambda a, b: tirx.min(a, b) if _is_expr(a, b) else min(a, b),
            "Max": lambda a, b: tirx.max(a, b) if _is_expr(a, b) else max(a, b),
        }
        result = args[0]
        for other in args[1:]:
            result = _each(table[op], result, other)
        return result
    if op in ("Min", "Max"):
        fn = np.minimum if op == "Min" else np.maximum
        result = args[0]
        for other in args[1:]:
            result = fn(result, other)
        return result
    a, b = args
    with np.errstate(all="ignore"):
        if op == "Div":
            if a.dtype.kind == "f":
                return (a / b).astype(a.dtype)
            if np.any(b == 0):
                return None
            return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
        if op == "Mod":
            if a.dtype.kind != "f" and np.any(b == 0):
                return None
            return np.fmod(a, b) if node.attr("fmod", 0) else np.mod(a, b)
        return {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}[op](a, b)


@_folds("Neg", "Abs", "Floor", "Ceil", "Sqrt", "Not")
def _unary(node: Node, args: list[np.ndarray]) -> Any:
    (a,) = args
    if symbolic(a):
        if node.op == "Neg":
            return _each(lambda v: -v, a)
        raise NotImplementedError
    fns: dict[str, Any] = {
        "Neg": np.negative, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil,
        "Sqrt": np.sqrt, "Not": np.logical_not,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        return fns[node.op](a)


@_folds("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or")
def _compare(node: Node, args: list[np.ndarray]) -> Any:
    a, b = args
    fns: dict[str, Any] = {
        "Equal": np.equal, "Less": np.less, "Greater": np.greater,
        "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal,
        "And": np.logical_and, "Or": np.logical_or,
    }  # fmt: skip
    if symbolic(a) or symbolic(b):
        # A symbolic dim compared with -1 or 0 (`Where(shape == -1, …)`) is the case that matters:
        # dims are at least 1 unless bounded otherwise, which simplify() cannot know.
        def equal(x: Any, y: Any) -> bool:
            if not _is_expr(x, y):
                return bool(fns[node.op](x, y))
            number = x if not _is_expr(x) else y if not _is_expr(y) else None
            if node.op == "Equal" and number is not None and number < 0:
                return False
            if node.op == "Equal" and number is None and simplify(x - y) == 0:
                return True
            raise NotImplementedError

        return _each(equal, a, b).astype(bool)
    return fns[node.op](a, b)


@_folds("Where")
def _where(node: Node, args: list[np.ndarray]) -> Any:
    _numbers_only(args[0])
    if symbolic(args[1]) or symbolic(args[2]):
        return _each(lambda c, a, b: a if c else b, *args)
    return np.where(*args)


@_folds("Cast")
def _cast(node: Node, args: list[np.ndarray]) -> Any:
    (a,) = args
    to = helper.tensor_dtype_to_np_dtype(node.attrs["to"])
    if symbolic(a):
        if to.kind in "iu" and to.itemsize >= 4:
            return a  # materialised as int64 only where it is used as an int64 shape
        raise NotImplementedError
    if a.dtype.kind not in "iubf" or to.kind not in "iubf":
        return None
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f" and to.kind in "iu" and not np.all(np.isfinite(a)):
            return None
        return a.astype(to)


@_folds("Identity")
def _identity(node: Node, args: list[np.ndarray]) -> Any:
    return args[0]


@_folds("Concat")
def _concat(node: Node, args: list[np.ndarray]) -> Any:
    if any(symbolic(a) for a in args):
        args = [a.astype(object) for a in args]
    return np.concatenate(args, axis=node.attr("axis", 1))


@_folds("Gather")
def _gather(node: Node, args: list[np.ndarray]) -> Any:
    data, indices = args
    _numbers_only(indices)
    size = data.shape[node.axis(node.attr("axis", 0), data.ndim)]
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise node.fail(f"a constant index is outside [-{size}, {size - 1}]")
    return np.take(data, indices.astype(np.int64), axis=node.attr("axis", 0))


def _axes(node: Node, args: list[np.ndarray], i: int = 1) -> list[int] | None:
    if len(args) > i and args[i] is not None:
        _numbers_only(args[i])
        return [int(v) for v in args[i].reshape(-1)]
    axes = node.attr("axes")
    return None if axes is None else list(axes)


@_folds("Unsqueeze")
def _unsqueeze(node: Node, args: list[np.ndarray]) -> Any:
    axes = _axes(node, args)
    if axes is None:
        raise node.fail("axes are missing")
    return np.expand_dims(args[0], tuple(axes))


@_folds("Squeeze")
def _squeeze(node: Node, args: list[np.ndarray]) -> Any:
    axes = _axes(node, args)
    return np.squeeze(args[0], None if axes is None else tuple(axes))


@_folds("Reshape")
def _reshape(node: Node, args: list[np.ndarray]) -> Any:
    data, target = args
    _numbers_only(target)
    dims = [int(v) for v in target]
    if not node.attr("allowzero", 0):
        dims = [data.shape[i] if d == 0 else d for i, d in enumerate(dims)]
    return data.reshape(dims)


@_folds("Slice")
def _slice(node: Node, args: list[np.ndarray]) -> Any:
    data = args[0]
    if node.opset < 10:
        starts, ends = node.attrs["starts"], node.attrs["ends"]
        axes, steps = node.attr("axes"), None
    else:
        _numbers_only(*args[1:])
        starts, ends = args[1].tolist(), args[2].tolist()
        axes = args[3].tolist() if len(args) > 3 and args[3] is not None else None
        steps = args[4].tolist() if len(args) > 4 and args[4] is not None else None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index: list[Any] = [slice(None)] * data.ndim
    for s, e, a, st in zip(starts, ends, axes, steps):
        # A negative step that runs past the front ends at None in Python.
        size = data.shape[a]
        if st < 0 and e < -size:
            e = None
        index[a] = slice(s, e, st)
    return data[tuple(index)]


@_folds("Transpose")
def _transpose(node: Node, args: list[np.ndarray]) -> Any:
    return np.transpose(args[0], node.attr("perm"))


@_folds("Expand")
def _expand(node: Node, args: list[np.ndarray]) -> Any:
    _numbers_only(args[1])
    shape = tuple(int(v) for v in args[1])
    if math.prod(shape) > LIMIT:
        return None
    return np.broadcast_to(args[0], np.broadcast_shapes(args[0].shape, shape)).copy()


@_folds("Tile")
def _tile(node: Node, args: list[np.ndarray]) -> Any:
    _numbers_only(args[1])
    if math.prod(int(v) for v in args[1]) * args[0].size > LIMIT:
        return None
    return np.tile(args[0], tuple(int(v) for v in args[1]))


@_folds("ConstantOfShape")
def _constant_of_shape(node: Node, args: list[np.ndarray]) -> Any:
    _numbers_only(args[0])
    shape = tuple(int(v) for v in args[0])
    if math.prod(shape) > LIMIT:
        return None
    value = np.asarray(node.attr("value", np.zeros(1, np.float32))).reshape(-1)[0]
    return np.full(shape, value, dtype=value.dtype)


@_folds("Range")
def _range(node: Node, args: list[np.ndarray]) -> Any:
    _numbers_only(*args)
    start, limit, delta = (a.reshape(-1)[0] for a in args)
    if delta == 0 or abs((limit - start) / delta) > LIMIT:
        return None
    count = max(math.ceil((limit - start) / delta), 0)
    return (start + np.arange(count) * delta).astype(args[0].dtype)


@_folds("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(node: Node, args: list[np.ndarray]) -> Any:
    data = args[0]
    if data.dtype.kind not in "iO":
        return None
    axes = _axes(node, args)
    if axes == [] or axes is None:
        if node.attr("noop_with_empty_axes", 0):
            return data
        axes = list(range(data.ndim))
    if symbolic(data) and node.op in ("ReduceMax", "ReduceMin"):
        raise NotImplementedError
    fn: Any = {
        "ReduceProd": np.prod, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min,
    }[node.op]  # fmt: skip
    if data.size == 0:
        return None
    result = fn(data, axis=tuple(axes), keepdims=bool(node.attr("keepdims", 1)))
    if symbolic(data):
        boxed = np.empty(np.shape(result), dtype=object)
        boxed[...] = result
        return boxed
    return np.asarray(result).astype(data.dtype)


@_folds("Split")
def _split(node: Node, args: list[np.ndarray]) -> Any:
    data = args[0]
    axis = node.attr("axis", 0)
    if len(args) > 1 and args[1] is not None:
        _numbers_only(args[1])
        sizes = [int(v) for v in args[1]]
    elif node.attr("split"):
        sizes = list(node.attrs["split"])
    else:
        step = -(-data.shape[axis] // node.num_outputs)
        return [
            np.take(data, range(k * step, min((k + 1) * step, data.shape[axis])), axis=axis)
            for k in range(node.num_outputs)
        ]
    return list(np.split(data, np.cumsum(sizes)[:-1], axis=axis))
