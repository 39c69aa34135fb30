"""Element-wise converters: arithmetic, comparison, logic, bits, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax import op as R

from tvmx.frontend.node import Expr, Node, converter, dtype_of, np_dtype
from tvmx.frontend.ops_shape import cast, const_of

FLOATS = ("float32", "float16", "float64", "bfloat16")
HALF = ("float16", "bfloat16")


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def scalar(node: Node, value: Any, like: Expr) -> Expr:
    return node.const(value, dtype_of(like))


# Code generation knows these in float32 and float64 only.
_WIDE = {"Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh"}


def _plain(op: str, fn: Callable[[Expr], Expr]) -> None:
    @converter(op)
    def convert(node: Node) -> Expr:
        x = node[0]
        if op in _WIDE and dtype_of(x) in HALF:
            return cast(node, node.emit(fn(cast(node, x, "float32"))), dtype_of(x))
        return node.emit(fn(x))


for _op, _fn in {
    "Abs": R.abs, "Exp": R.exp, "Log": R.log, "Sqrt": R.sqrt, "Sigmoid": R.sigmoid,
    "Tanh": R.tanh, "Sin": R.sin, "Cos": R.cos, "Tan": R.tan, "Sinh": R.sinh, "Cosh": R.cosh,
    "Asin": R.asin, "Acos": R.acos, "Atan": R.atan, "Asinh": R.asinh, "Acosh": R.acosh,
    "Atanh": R.atanh, "Floor": R.floor, "Ceil": R.ceil, "Erf": R.erf,
    "Neg": R.negative, "Not": R.logical_not, "IsNaN": R.isnan, "BitwiseNot": R.bitwise_not,
}.items():  # fmt: skip
    _plain(_op, _fn)


@converter("Sign")
def sign(node: Node) -> Expr:
    x = node[0]
    return node.emit(R.minimum(x, scalar(node, 1, x)) if dtype_of(x).startswith("uint") else R.sign(x))


def _each(node: Node, fn: Callable[..., Any], *args: Expr, name: str | None = None) -> Expr:
    """One element-wise kernel with broadcasting."""

    def kernel(*tensors: Any) -> Any:
        rank = max(len(t.shape) for t in tensors)
        shape: list[Any] = [1] * rank
        for t in tensors:
            for i, d in enumerate(t.shape, rank - len(t.shape)):
                if not (isinstance(d, tirx.IntImm) and d.value == 1):
                    shape[i] = d

        def at(*idx: Any) -> Any:
            values = []
            for t in tensors:
                tail = idx[rank - len(t.shape) :]
                values.append(
                    t(*(0 if isinstance(d, tirx.IntImm) and d.value == 1 else k
                        for k, d in zip(tail, t.shape)))
                )  # fmt: skip
            return fn(*values)

        return te.compute(shape, at, name=name or node.op.lower())

    return node.te(kernel, *args, name=name)


@converter("Round")
def round_op(node: Node) -> Expr:
    """Half to even: the nearest integer that `nearbyint` gives in the default rounding mode."""
    return _each(node, tirx.nearbyint, node[0])


@converter("IsInf")
def is_inf(node: Node) -> Expr:
    positive, negative = node.attr("detect_positive", 1), node.attr("detect_negative", 1)
    inf = math.inf

    x = node[0]
    up = node.emit(R.equal(x, scalar(node, inf, x)))
    down = node.emit(R.equal(x, scalar(node, -inf, x)))
    if positive and negative:
        return node.emit(R.logical_or(up, down))
    if positive:
        return up
    if negative:
        return down
    return node.emit(R.logical_and(up, down))  # neither asked for: false everywhere


@converter("Reciprocal")
def reciprocal(node: Node) -> Expr:
    return node.emit(R.divide(scalar(node, 1, node[0]), node[0]))


# two operands


def _legacy_broadcast(node: Node) -> tuple[Expr, Expr]:
    """Operands of a binary operator; before opset 7 the second one is aligned at `axis`."""
    a, b = node[0], node[1]
    if node.opset < 7 and node.attr("broadcast", 0) and "axis" in node.attrs:
        rank, axis = node.rank(0), node.axis(node.attrs["axis"], node.rank(0))
        dims = node.dims(b)
        b = node.emit(R.reshape(b, [*dims, *[1] * (rank - axis - len(dims))]))
    return a, b


def _binary(op: str, fn: Callable[[Expr, Expr], Expr]) -> None:
    @converter(op)
    def convert(node: Node) -> Expr:
        a, b = _legacy_broadcast(node)
        return node.emit(fn(a, b))


for _op2, _fn2 in {
    "Add": R.add, "Sub": R.subtract, "Mul": R.multiply, "And": R.logical_and, "Or": R.logical_or,
    "Xor": R.logical_xor, "Less": R.less, "Greater": R.greater,
    "LessOrEqual": R.less_equal, "GreaterOrEqual": R.greater_equal, "BitwiseAnd": R.bitwise_and,
    "BitwiseOr": R.bitwise_or, "BitwiseXor": R.bitwise_xor,
}.items():  # fmt: skip
    _binary(_op2, _fn2)


@converter("Equal")
def equal(node: Node) -> Expr:
    a, b = _legacy_broadcast(node)
    if dtype_of(a) == "bool":  # LLVM has no comparison of the bits that TVM asks for
        return node.emit(R.logical_not(node.emit(R.logical_xor(a, b))))
    return node.emit(R.equal(a, b))


@converter("Div")
def div(node: Node) -> Expr:
    a, b = _legacy_broadcast(node)
    if is_float(dtype_of(a)):
        return node.emit(R.divide(a, b))
    divisor = const_of(b)
    if divisor is not None and np.all(divisor != 0) and (divisor.dtype.kind == "u" or np.all(divisor != -1)):
        return _each(node, tirx.truncdiv, a, b)

    def quotient(x: Any, y: Any) -> Any:
        zero = tirx.const(0, y.ty.dtype)
        found = tirx.truncdiv(x, _divisor(y))
        if _is_signed(y):
            found = tirx.Select(y == tirx.const(-1, y.ty.dtype), zero - x, found)
        return tirx.Select(y == 0, zero, found)

    return _each(node, quotient, a, b)


def _is_signed(y: Any) -> bool:
    return str(y.ty.dtype).startswith("int")


def _divisor(y: Any) -> Any:
    """`y`, but 1 where dividing by it would end the process: x86 traps on x / 0, and on the smallest integer / -1.

    The operators leave division by zero open; the caller puts 0 there, and -x for -1.
    """
    one = tirx.const(1, y.ty.dtype)
    safe = tirx.Select(y == 0, one, y)
    return tirx.Select(y == tirx.const(-1, y.ty.dtype), one, safe) if _is_signed(y) else safe


@converter("Mod")
def mod(node: Node) -> Expr:
    dtype = node.dtype(0)
    fmod = node.attr("fmod", 0)
    if is_float(dtype):
        wide = dtype if dtype in ("float32", "float64") else "float32"

        def of(x: Any, y: Any) -> Any:
            x, y = x.astype(wide), y.astype(wide)
            r = tirx.Mod(x, y)  # frem
            if not fmod:
                zero = tirx.const(0, wide)
                wrong_side = tirx.any(tirx.all(r < zero, y > zero), tirx.all(r > zero, y < zero))
                # An exact multiple takes the divisor's sign, as in numpy.
                r = tirx.Select(wrong_side, r + y, r)
                r = tirx.Select(r == zero, tirx.copysign(zero, y), r)
            return r.astype(dtype)

        return _each(node, of, node[0], node[1])

    # What remains of a division by -1 is 0, as of one by 1.
    fn = tirx.truncmod if fmod else tirx.floormod
    return _each(node, lambda x, y: fn(x, _divisor(y)), node[0], node[1])


@converter("Pow")
def pow_op(node: Node) -> Expr:
    x, y = _legacy_broadcast(node)
    dtype = dtype_of(x)
    exponent = const_of(y)
    if exponent is not None and exponent.size == 1 and is_float(dtype):
        e = float(exponent.reshape(-1)[0])
        if e == 1:
            return (
                x
                if exponent.ndim <= node.rank(0)
                else node.emit(R.multiply(x, scalar(node, np.ones(exponent.shape), x)))
            )
        if exponent.ndim <= node.rank(0):
            if e == 2:
                return node.emit(R.multiply(x, x))
            if e == 3:
                return node.emit(R.multiply(node.emit(R.multiply(x, x)), x))
            if e == 0.5:
                return node.emit(R.sqrt(x))
    if is_float(dtype):
        return node.emit(R.power(x, cast(node, y, dtype)))
    # Integers: exact only through a wider float; int64 beyond 2**53 would lose bits.
    return _each(node, lambda a, b: tirx.power(a.astype("float64"), b.astype("float64")).astype(dtype), x, y)


@converter("BitShift")
def bit_shift(node: Node) -> Expr:
    dtype = node.dtype(0)
    bits = np_dtype(dtype).itemsize * 8
    left = node.attr("direction") == "LEFT"

    def of(x: Any, y: Any) -> Any:
        # Shifting by the width or more, or by less than nothing, is undefined in LLVM; here all bits
        # are shifted out. (A uint64 amount above int64 turns negative in the comparison.)
        wide = y.astype("int64")
        inside = tirx.all(wide >= 0, wide < bits)
        amount = tirx.Select(inside, y, tirx.const(0, dtype))
        gone = tirx.const(0, dtype)
        if not left and dtype.startswith("int"):
            gone = x >> tirx.const(bits - 1, dtype)
        return tirx.Select(inside, (x << amount) if left else (x >> amount), gone)

    return _each(node, of, node[0], node[1])


# many operands


@converter("Sum", "Mean")
def sum_mean(node: Node) -> Expr:
    total = node[0]
    for i in range(1, len(node)):
        total = node.emit(R.add(total, node[i]))
    if node.op == "Mean":
        total = node.emit(R.divide(total, scalar(node, len(node), total)))
    return total


@converter("Min", "Max")
def min_max(node: Node) -> Expr:
    fn = R.minimum if node.op == "Min" else R.maximum
    result = node[0]
    for i in range(1, len(node)):
        result = node.emit(fn(result, node[i]))
    return result


@converter("Where")
def where(node: Node) -> Expr:
    return node.emit(R.where(node[0], node[1], node[2]))


@converter("Clip")
def clip(node: Node) -> Expr:
    x = node[0]
    low, high = node.get(1), node.get(2)
    if node.opset < 11:
        low = scalar(node, node.attrs["min"], x) if "min" in node.attrs else None
        high = scalar(node, node.attrs["max"], x) if "max" in node.attrs else None
    lo, hi = (None if b is None else const_of(b) for b in (low, high))
    if (
        is_float(dtype_of(x)) and lo is not None and hi is not None and lo.size == hi.size == 1
        and float(lo.reshape(())) <= float(hi.reshape(()))
    ):  # fmt: skip
        return node.emit(R.clip(x, float(lo.reshape(())), float(hi.reshape(()))))
    if low is not None:
        x = node.emit(R.maximum(x, low))
    if high is not None:
        x = node.emit(R.minimum(x, high))
    return x


# activations


@converter("Relu")
def relu(node: Node) -> Expr:
    x = node[0]
    if not is_float(dtype_of(x)):
        return node.emit(R.maximum(x, scalar(node, 0, x)))
    return node.emit(R.nn.relu(x))


@converter("LeakyRelu")
def leaky_relu(node: Node) -> Expr:
    return node.emit(R.nn.leakyrelu(node[0], float(node.attr("alpha", 0.01))))


def _wide(dtype: str) -> str:
    return dtype if dtype in ("float32", "float64") else "float32"


def _activation(node: Node, fn: Callable[[Any, Callable[[float], Any]], Any], name: str | None = None) -> Expr:
    """An element-wise kernel computed in at least float32; `fn(x, c)` with c making constants."""
    dtype = node.dtype(0)
    wide = _wide(dtype)

    def of(x: Any) -> Any:
        value = fn(x.astype(wide), lambda v: tirx.const(v, wide))
        return value.astype(dtype)

    return _each(node, of, node[0], name=name)


@converter("Elu")
def elu(node: Node) -> Expr:
    alpha = float(node.attr("alpha", 1.0))
    return _activation(node, lambda x, c: tirx.Select(x >= c(0), x, c(alpha) * (tirx.exp(x) - c(1))))


@converter("Celu")
def celu(node: Node) -> Expr:
    alpha = float(node.attr("alpha", 1.0))
    return _activation(
        node,
        lambda x, c: tirx.max(c(0), x) + tirx.min(c(0), c(alpha) * (tirx.exp(x / c(alpha)) - c(1))),
    )


@converter("Selu")
def selu(node: Node) -> Expr:
    alpha = float(node.attr("alpha", 1.67326319217681884765625))
    gamma = float(node.attr("gamma", 1.05070102214813232421875))
    return _activation(
        node,
        lambda x, c: c(gamma) * tirx.Select(x > c(0), x, c(alpha) * (tirx.exp(x) - c(1))),
    )


@converter("HardSigmoid")
def hard_sigmoid(node: Node) -> Expr:
    x = node[0]
    alpha, beta = float(node.attr("alpha", 0.2)), float(node.attr("beta", 0.5))
    y = node.emit(R.add(node.emit(R.multiply(x, scalar(node, alpha, x))), scalar(node, beta, x)))
    return node.emit(R.clip(y, 0.0, 1.0))


@converter("HardSwish")
def hard_swish(node: Node) -> Expr:
    x = node[0]
    y = node.emit(R.add(node.emit(R.multiply(x, scalar(node, 1 / 6, x))), scalar(node, 0.5, x)))
    return node.emit(R.multiply(x, node.emit(R.clip(y, 0.0, 1.0))))


@converter("Softplus")
def softplus(node: Node) -> Expr:
    """max(x, 0) + log1p(exp(-|x|)): no overflow for large x, no cancellation for small ones."""

    def value(x: Any, c: Any) -> Any:
        # log1p(e) = 2 atanh(e / (2 + e)), whose argument is at most 1/3: eight terms for float32, eighteen for float64.
        s = tirx.Var("s", x.ty)
        terms = c(0)
        for k in range(37 if str(x.ty) == "float64" else 17, 0, -2):
            terms = terms * (s * s) + c(1 / k)
        return tirx.max(x, c(0)) + tirx.Let(s, c(1) / (c(1) + c(2) * tirx.exp(tirx.abs(x))), c(2) * s * terms)

    return _activation(node, value)


@converter("Softsign")
def softsign(node: Node) -> Expr:
    return _activation(node, lambda x, c: x / (c(1) + tirx.abs(x)))


@converter("ThresholdedRelu")
def thresholded_relu(node: Node) -> Expr:
    alpha = float(node.attr("alpha", 1.0))
    return _activation(node, lambda x, c: tirx.Select(x > c(alpha), x, c(0)))


@converter("Shrink")
def shrink(node: Node) -> Expr:
    lambd, bias = float(node.attr("lambd", 0.5)), float(node.attr("bias", 0.0))
    return _activation(
        node,
        lambda x, c: tirx.Select(x < c(-lambd), x + c(bias), tirx.Select(x > c(lambd), x - c(bias), c(0))),
    )


@converter("Mish")
def mish(node: Node) -> Expr:
    def fn(x: Any, c: Any) -> Any:
        soft = tirx.max(x, c(0)) + tirx.log(c(1) + tirx.exp(c(0) - tirx.abs(x)))
        return x * tirx.tanh(soft)

    return _activation(node, fn)


@converter("Swish")
def swish(node: Node) -> Expr:
    x = node[0]
    alpha = float(node.attr("alpha", 1.0))
    inner = x if alpha == 1.0 else node.emit(R.multiply(x, scalar(node, alpha, x)))
    return node.emit(R.multiply(x, node.emit(R.sigmoid(inner))))


@converter("Gelu")
def gelu(node: Node) -> Expr:
    tanh = node.attr("approximate", "none") == "tanh"
    return node.emit(R.nn.gelu_tanh(node[0]) if tanh else R.nn.gelu(node[0]))


@converter("Gelu", domain="com.microsoft")
def gelu_ms(node: Node) -> Expr:
    return node.emit(R.nn.gelu(node[0]))


@converter("PRelu")
def prelu(node: Node) -> Expr:
    x, slope = node[0], node[1]
    dims, rank = node.dims(slope), node.rank(0)
    if node.opset < 7 and len(dims) == 1 and rank > 1:
        slope = node.emit(R.reshape(slope, [*dims, *[1] * (rank - 2)]))
    dtype = dtype_of(x)
    return _each(node, lambda a, s: tirx.Select(a < tirx.const(0, dtype), a * s, a), x, slope)


@converter("Dropout")
def dropout(node: Node) -> list[Expr]:
    training = node.static(2)
    if training is not None and bool(training.reshape(-1)[0]):
        ratio = node.static(1)
        if ratio is None or float(ratio.reshape(-1)[0]) != 0:
            raise node.fail("training_mode is true; tvmx compiles for inference: set it to false")
    elif node.has(2) and training is None:
        raise node.fail(f"training_mode is an input; bind it: constants={{{node.proto.input[2]!r}: False}}")
    result = [node[0]]
    if node.wants(1):
        mask_dtype = "bool" if node.opset >= 10 else node.dtype(0)
        dims = node.int_shape(0)
        result.append(node.const(np.ones(dims), mask_dtype))
    return result


@converter("BitCast")
def bit_cast(node: Node) -> Expr:
    from onnx import helper

    to = str(helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    if np_dtype(to).itemsize != np_dtype(node.dtype(0)).itemsize:
        raise node.fail(f"{node.dtype(0)} and {to} have different sizes")
    if node.dtype(0) == to:
        return node[0]
    if "bool" in (to, node.dtype(0)):
        raise node.fail("bits of a bool are not defined; cast to uint8 first")
    return _each(node, lambda x: tirx.reinterpret(to, x), node[0])
