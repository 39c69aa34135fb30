"""Constant folding in numpy.

TVM's FoldConstant compiles one kernel per folded call (seconds per model) and folds whatever it can, which would
turn int8 weights back into floats. Here a call is evaluated by numpy, and one whose result is larger than its
operands stays, unless it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmx.passes.constants import FOLDABLE, as_array, as_constant
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name

GROWTH_LIMIT = 1 << 12  # bytes: a constant up to this size may be larger than what it is computed from

Array = Any  # np.ndarray of any dtype
Evaluator = Callable[[Any, list[Array]], "Array | None"]


def _axes(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(v) for v in values)


def _to_shape(call: Any, args: list[Array]) -> Array | None:
    shape = dims_of(call)
    return args[0].reshape(shape) if shape is not None and all(isinstance(d, int) for d in shape) else None


def _broadcast(call: Any, args: list[Array]) -> Array | None:
    shape = dims_of(call)
    return np.broadcast_to(args[0], shape) if shape is not None and all(isinstance(d, int) for d in shape) else None


def slices_of(call: Any, rank: int) -> tuple[slice, ...] | None:
    """The slices of a strided_slice, or None where bounds are computed or a step goes backwards."""
    from tvm import relax, tirx

    if not all(isinstance(a, relax.Tuple) for a in call.args[1:]):
        return None
    bounds = [[int(v) for v in a.fields if isinstance(v, (int, tirx.IntImm))] for a in call.args[1:]]
    if any(len(b) != len(a.fields) for b, a in zip(bounds, call.args[1:])):
        return None
    steps = bounds[3] if len(bounds) > 3 else [1] * len(bounds[0])
    if any(s < 0 for s in steps):
        return None
    index = [slice(None)] * rank
    for axis, start, stop, step in zip(bounds[0], bounds[1], bounds[2], steps):
        index[axis] = slice(start, stop, step)
    return tuple(index)


def _slice(call: Any, args: list[Array]) -> Array | None:
    index = slices_of(call, args[0].ndim)
    return None if index is None else args[0][index]


def _take(call: Any, args: list[Array]) -> Array | None:
    axis = call.attrs.axis
    data, indices = args
    size = data.size if axis is None else data.shape[int(axis)]
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        return None
    return np.take(data, indices, axis=None if axis is None else int(axis))


def _reduce(fn: Callable[..., Array]) -> Evaluator:
    def evaluate(call: Any, args: list[Array]) -> Array:
        return fn(args[0], axis=_axes(call.attrs.axis), keepdims=bool(call.attrs.keepdims))

    return evaluate


def _elementwise(fn: Callable[..., Array]) -> Evaluator:
    return lambda call, args: fn(*args)


def _divide(call: Any, args: list[Array]) -> Array | None:
    if args[0].dtype.kind == "f":
        return args[0] / args[1]
    return None if (args[1] == 0).any() else np.trunc(args[0] / args[1])


_UNARY: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "floor": np.floor,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "logical_not": np.logical_not,
    "negative": np.negative,
    "round": np.round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
    "nn.relu": lambda x: np.maximum(x, 0),
}
_BINARY: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "where": np.where,
}

EVALUATORS: dict[str, Evaluator] = {
    **{name: _elementwise(fn) for name, fn in (*_UNARY.items(), *_BINARY.items())},
    **{name: _reduce(getattr(np, name)) for name in ("sum", "mean", "max", "min", "prod")},
    **{name: _to_shape for name in ("reshape", "squeeze", "expand_dims", "flatten")},
    "astype": lambda call, args: args[0].astype(dtype_of(call)),
    "broadcast_to": _broadcast,
    "concat": lambda call, args: np.concatenate(args, axis=int(call.attrs.axis)),
    "divide": _divide,
    "permute_dims": lambda call, args: args[0].transpose(_axes(call.attrs.axes)),
    "stack": lambda call, args: np.stack(args, axis=int(call.attrs.axis)),
    "strided_slice": _slice,
    "take": _take,
}


def fold(scope: Scope, call: Any) -> Any:
    """A call whose tensor operands are all constants  →  its value."""
    from tvm import relax

    operands = scope.definition(call.args[0]) if call.args else None
    fields = (
        operands.fields if isinstance(operands, relax.Tuple) and op_name(call) in ("concat", "stack") else call.args
    )
    arrays: list[Array] = []
    for field in fields:
        if isinstance(field.ty, relax.TensorType):
            array = as_array(field)
            if array is None:
                return None
            arrays.append(array)
    shape, dtype = dims_of(call), dtype_of(call)
    if not arrays or shape is None or not all(isinstance(d, int) for d in shape) or dtype not in FOLDABLE:
        return None
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > GROWTH_LIMIT and size > sum(a.nbytes for a in arrays):
        return Refusal(f"{size} bytes of constants would come from {sum(a.nbytes for a in arrays)}")
    with np.errstate(all="ignore"):
        result = EVALUATORS[op_name(call)](call, arrays)
    if result is None:
        return Refusal("numpy has no equal of these operands")
    result = np.asarray(result).astype(dtype, copy=False)
    assert result.shape == shape, f"{op_name(call)} folded to {result.shape}, not {shape}"
    return as_constant(result)


def shape_as_tensor(scope: Scope, call: Any) -> Any:
    """shape_to_tensor of a static shape  →  a constant."""
    from tvm import relax, tirx

    shape = scope.definition(call.args[0])
    if op_name(shape) == "shape_of":
        shape = shape.args[0].ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(d, tirx.IntImm) for d in shape.values):
        return None
    return as_constant(np.array([int(d) for d in shape.values], "int64"))


RULES = (
    RewriteRule("fold", tuple(EVALUATORS), fold),
    RewriteRule("shape_as_tensor", ("shape_to_tensor",), shape_as_tensor),
)
