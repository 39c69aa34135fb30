"""Rules that undo what importers leave behind: operators hidden in TensorIR, stacks of two, trivial shape operators."""

from __future__ import annotations

from typing import Any

from tvmx.passes.constants import scalar
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dims_of, dtype_of, op_name
from tvmx.passes.view import same_dims


def extremum_from_tir(scope: Scope, call: Any) -> Any:
    """call_tir of `max(A[i], B[i or ()])`  →  R.maximum(A, B); the same for min."""
    import tvm
    from tvm import relax, tirx

    gvar, args = call.args[0], call.args[1]
    if not isinstance(args, relax.Tuple) or len(args.fields) != 2 or len(call.args) != 2:
        return None
    func = scope.mod[gvar]
    body = func.body
    indices: list[Any] = []
    while True:
        if isinstance(body, tvm.s_tir.SBlockRealize):
            body = body.block.body
        elif isinstance(body, tirx.For):
            body = body.body
        else:
            break
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, (tirx.Max, tirx.Min)):
        return None
    indices = list(body.indices)
    buffers = list(func.params)
    loads = [body.value.a, body.value.b]
    for load, buffer in zip(loads, buffers):
        if not isinstance(load, tvm.ir.TensorLoad) or not load.source.same_as(buffer):
            return None
        if len(load.indices) not in (0, len(indices)):
            return Refusal("operands broadcast in a way the rule does not read")
        if len(load.indices) and not all(a.same_as(b) for a, b in zip(load.indices, indices)):
            return Refusal("operands are read at shifted places")
    make = relax.op.maximum if isinstance(body.value, tirx.Max) else relax.op.minimum
    return make(*args.fields)


def extremum_of_stack(scope: Scope, call: Any) -> Any:
    """max(stack([a, b], axis), axis)  →  maximum(a, b); the importer writes Max and Min of two tensors so."""
    from tvm import relax

    stack = scope.call(call.args[0], "stack", "concat")
    if stack is None or bool(call.attrs.keepdims) or call.attrs.axis is None or len(call.attrs.axis) != 1:
        return None
    fields = scope.definition(stack.args[0])
    rank = len(dims_of(call.args[0]) or ())
    if op_name(stack) != "stack" or not isinstance(fields, relax.Tuple):
        return None
    if int(stack.attrs.axis or 0) % rank != int(call.attrs.axis[0]) % rank:
        return Refusal("the reduced axis is not the stacked one")
    make = relax.op.maximum if op_name(call) == "max" else relax.op.minimum
    result = fields.fields[0]
    for i, field in enumerate(fields.fields[1:]):
        result = make(result, field)
        if i < len(fields.fields) - 2:
            result = scope.emit(result)
    return result


def implicit_broadcast(scope: Scope, call: Any) -> Any:
    """add(x, broadcast_to(y))  →  add(x, y), where the result keeps its shape."""
    import tvm

    shape = dims_of(call)
    if shape is None or len(call.args) != 2:
        return None
    for i, arg in enumerate(call.args):
        wide, other = scope.call(arg, "broadcast_to"), dims_of(call.args[1 - i])
        if wide is not None and other is not None and same_dims(other, shape) and dims_of(wide.args[0]) is not None:
            args = list(call.args)
            args[i] = wide.args[0]
            return tvm.ir.Call(call.op, args, call.attrs, call.ty_args)
    return None


def clip(scope: Scope, call: Any) -> Any:
    """minimum(maximum(x, low), high) with constants  →  clip(x, low, high)."""
    from tvm import relax

    high, inner = scalar(call.args[1]), scope.call(call.args[0], "maximum")
    if inner is None or high is None:
        return None
    low = scalar(inner.args[1])
    if low is None:
        return None
    if not scope.used_once(call.args[0]):
        return Refusal("the lower-bounded value is used elsewhere")
    if low > high:
        return Refusal(f"bounds {low} > {high}: clip and min(max()) differ there")
    if dims_of(call) != dims_of(inner.args[0]) or not dtype_of(call).startswith("float"):
        return Refusal("a bound changes the shape, or integers")
    return relax.op.clip(inner.args[0], low, high)


def same_shape(scope: Scope, call: Any) -> Any:
    """reshape, broadcast_to, squeeze, expand_dims, flatten to the shape that is there already  →  the operand."""
    before, after = dims_of(call.args[0]), dims_of(call)
    return call.args[0] if before is not None and after is not None and same_dims(before, after) else None


def same_order(scope: Scope, call: Any) -> Any:
    """permute_dims that keeps the order  →  the operand."""
    axes = call.attrs.axes
    if axes is not None and [int(a) for a in axes] == list(range(len(axes))):
        return call.args[0]
    return None


def same_dtype(scope: Scope, call: Any) -> Any:
    """astype to the dtype that is there already  →  the operand."""
    return call.args[0] if dtype_of(call.args[0]) == dtype_of(call) else None


def reshape_twice(scope: Scope, call: Any) -> Any:
    """reshape(reshape(x, a), b)  →  reshape(x, b)."""
    from tvm import relax

    inner = scope.call(call.args[0], "reshape", "squeeze", "expand_dims", "flatten")
    shape = dims_of(call)
    if inner is None or shape is None or dims_of(inner.args[0]) is None:
        return None
    return relax.op.reshape(inner.args[0], shape)


def cast_twice(scope: Scope, call: Any) -> Any:
    """astype(astype(x, wider), dtype)  →  astype(x, dtype)."""
    from tvm import relax

    inner = scope.call(call.args[0], "astype")
    if inner is None:
        return None
    first, middle = dtype_of(inner.args[0]), dtype_of(inner)
    if first not in _EXACTLY_HELD or middle not in _EXACTLY_HELD[first]:
        return Refusal(f"{middle} does not hold every {first}")
    return relax.op.astype(inner.args[0], dtype_of(call))


def whole_slice(scope: Scope, call: Any) -> Any:
    """strided_slice or pad that keeps every element in place  →  the operand."""
    shape = dims_of(call)
    if shape is None or not same_dims(dims_of(call.args[0]) or (), shape):
        return None
    if op_name(call) == "nn.pad":
        return call.args[0] if not any(int(w) for w in call.attrs.pad_width) else None
    strides = call.args[4].fields if len(call.args) > 4 else ()
    return None if any(int(s) != 1 for s in strides) else call.args[0]


def single_concat(scope: Scope, call: Any) -> Any:
    """concat or a one-part split of one tensor  →  the tensor."""
    from tvm import relax

    fields = scope.definition(call.args[0])
    return fields.fields[0] if isinstance(fields, relax.Tuple) and len(fields.fields) == 1 else None


_EXACTLY_HELD = {
    "bool": {"uint8", "int8", "int32", "int64", "float16", "float32", "float64"},
    "int8": {"int16", "int32", "int64", "float16", "float32", "float64"},
    "uint8": {"int16", "int32", "int64", "float16", "float32", "float64"},
    "int32": {"int64", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
}
_BROADCASTING = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")

RULES = (
    RewriteRule("extremum_from_tir", ("call_tir",), extremum_from_tir),
    RewriteRule("extremum_of_stack", ("max", "min"), extremum_of_stack),
    RewriteRule("implicit_broadcast", _BROADCASTING, implicit_broadcast),
    RewriteRule("clip", ("minimum",), clip),
    RewriteRule("same_shape", ("reshape", "broadcast_to", "squeeze", "expand_dims", "flatten"), same_shape),
    RewriteRule("reshape_twice", ("reshape", "squeeze", "expand_dims", "flatten"), reshape_twice),
    RewriteRule("cast_twice", ("astype",), cast_twice),
    RewriteRule("whole_slice", ("strided_slice", "nn.pad"), whole_slice),
    RewriteRule("same_order", ("permute_dims",), same_order),
    RewriteRule("same_dtype", ("astype",), same_dtype),
    RewriteRule("single_concat", ("concat",), single_concat),
)
