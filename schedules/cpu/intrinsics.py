"""Vector code for exp, sigmoid, tanh, erf and log in float32.

LLVM has no vector form of these: it calls libm once per lane, ten to thirty times slower. Importing this module
gives TVM's LLVM target a lowering for each, made of multiplies and adds that work at any vector width and on every
CPU. Other dtypes keep TVM's own lowering, which computes float16 by way of float32.

The coefficients are minimax fits (iteratively reweighted least squares in extended precision) made for this file.
Largest relative errors in float32, over the range where the result is a normal number: exp 1.2e-7, sigmoid 2.4e-7,
tanh 4e-7, erf 4e-7, log 1.2e-7 (absolute, near 1). NaN in gives NaN out; infinities give the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_EXP = (0.4999999403953552, 0.1666651964187622, 0.04166839271783829, 0.008368780836462975, 0.001381446490995586)
_EXP_LOW, _EXP_HIGH = -87.33654, 88.7228394  # below: 0; above: infinity
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # exact in 12 bits, so that n * _LN2_HIGH is exact

_ERF_LIMIT = 4.0
_ERF_P = (1.12837914, 0.193547471, 0.0531019542, 0.00388340543, 0.000284560511, 1.98668423e-06)
_ERF_Q = (1.0, 0.504859537, 0.115350893, 0.0152073947, 0.00118557242, 3.74188546e-05)

_TANH_LIMIT = 7.9
_TANH_P = (0.999999994, 0.134506347, 0.00357900875, 2.20235206e-05, 1.54283574e-08)
_TANH_Q = (1.0, 0.467839627, 0.0261923016, 0.00034236779, 8.59893676e-07)

_LOG = (
    0.3333331346511841, -0.25000008940696716, 0.2000211924314499, -0.1666799634695053, 0.14219550788402557,
    -0.12405591458082199, 0.11888174712657928, -0.11675640940666199, 0.06746601313352585,
)  # fmt: skip
_SQRT_HALF_BITS = 0x3F3504F3


def install() -> None:
    """Register the lowerings (idempotent)."""
    from tvm.ir import register_op_attr
    from tvm.tirx import register_intrin_lowering

    for name, rule in _RULES.items():
        register_intrin_lowering(f"tirx.{name}", target="llvm", f=_lowering(name, rule), level=99)
    # TVM believes that erf cannot be vectorised; with the lowering above it can.
    register_op_attr("tirx.erf", "TVectorizable", True, level=99)


def _lowering(name: str, rule: Callable[[Any, str], Any]) -> Callable[[Any], Any]:
    def lower(call: Any) -> Any:
        x, dtype = call.args[0], str(call.ty)
        if dtype.startswith("float32"):
            return _bind(x, lambda v: rule(v, dtype))
        if dtype.startswith("float64"):
            return _libm(name, x, dtype)
        from tvm.tirx import Cast

        wide = "float32" + dtype.partition("16")[2]  # float16, bfloat16
        return Cast(dtype, _bind(Cast(wide, x), lambda v: rule(v, wide)))

    return lower


def _libm(name: str, x: Any, dtype: str) -> Any:
    """The float64 function of the C library, lane by lane."""
    from tvm.tirx import Shuffle, call_pure_extern

    if name == "sigmoid":
        one = _c(1.0, dtype)
        return one / (one + _libm("exp", _c(0.0, dtype) - x, dtype))
    lanes = int(dtype.partition("x")[2] or 1)
    if lanes == 1:
        return call_pure_extern("float64", name, x)
    return _bind(
        x,
        lambda v: Shuffle(
            [call_pure_extern("float64", name, Shuffle([v], [i])) for i in range(lanes)], list(range(lanes))
        ),
    )


def _bind(value: Any, body: Callable[[Any], Any]) -> Any:
    """`let v = value in body(v)`: the value is computed once however often the body reads it."""
    from tvm.tirx import Let, Var

    var = Var("v", value.ty)
    return Let(var, value, body(var))


def _c(value: float, dtype: str) -> Any:
    from tvm.tirx import const

    return const(value, dtype)


def _horner(x: Any, coefficients: Sequence[float], dtype: str) -> Any:
    result = _c(coefficients[-1], dtype)
    for value in reversed(coefficients[:-1]):
        result = result * x + _c(value, dtype)
    return result


def _clamp(x: Any, low: float, high: float, dtype: str) -> Any:
    from tvm.tirx import Max, Min

    # The constant comes first: LLVM's `a > b ? a : b` then hands a NaN in `x` through.
    return Min(_c(high, dtype), Max(_c(low, dtype), x))


def _as(dtype: str, value: Any) -> Any:
    from tvm.tirx import reinterpret

    return reinterpret(dtype, value)


def _exp(x: Any, dtype: str) -> Any:
    """exp(x) = 2^n exp(r) with n the integer nearest to x / ln 2."""
    ints = dtype.replace("float32", "int32")

    def scaled(clamped: Any) -> Any:
        return _bind(clamped * _c(_LOG2E, dtype) + _c(_ROUND, dtype), lambda t: with_exponent(clamped, t))

    def with_exponent(clamped: Any, t: Any) -> Any:
        def finish(r: Any) -> Any:
            p = _horner(r, _EXP, dtype) * (r * r) + r + _c(1.0, dtype)
            # 2^(n-1) and a doubling, because 2^128 has no bits of its own though exp(88.7) is finite.
            bits = (_as(ints, t) + _c(126, ints)) << _c(23, ints)
            return (p * _as(dtype, bits)) * _c(2.0, dtype)

        def remainder(n: Any) -> Any:
            return _bind((clamped - n * _c(_LN2_HIGH, dtype)) - n * _c(_LN2_LOW, dtype), finish)

        return _bind(t - _c(_ROUND, dtype), remainder)

    from tvm.tirx import Select

    inf = _c(float("inf"), dtype)
    value = _bind(_clamp(x, _EXP_LOW, _EXP_HIGH, dtype), scaled)
    return Select(x > _c(_EXP_HIGH, dtype), inf, value)


def _sigmoid(x: Any, dtype: str) -> Any:
    return _c(1.0, dtype) / (_c(1.0, dtype) + _bind(_c(0.0, dtype) - x, lambda y: _exp(y, dtype)))


def _odd_rational(x: Any, limit: float, p: Sequence[float], q: Sequence[float], dtype: str) -> Any:
    def value(clamped: Any) -> Any:
        return _bind(clamped * clamped, lambda t: (clamped * _horner(t, p, dtype)) / _horner(t, q, dtype))

    return _bind(_clamp(x, -limit, limit, dtype), value)


def _tanh(x: Any, dtype: str) -> Any:
    return _clamp(_odd_rational(x, _TANH_LIMIT, _TANH_P, _TANH_Q, dtype), -1.0, 1.0, dtype)


def _erf(x: Any, dtype: str) -> Any:
    return _clamp(_odd_rational(x, _ERF_LIMIT, _ERF_P, _ERF_Q, dtype), -1.0, 1.0, dtype)


def _log(x: Any, dtype: str) -> Any:
    """log(x) = e ln 2 + log(m) with m in [sqrt(1/2), sqrt(2))."""
    from tvm.tirx import Cast, Select

    ints = dtype.replace("float32", "int32")
    tiny = x < _c(1.17549435e-38, dtype)  # subnormal: scaled by 2^23 first
    bits = _as(ints, Select(tiny, x * _c(8388608.0, dtype), x))

    def split(b: Any) -> Any:
        return _bind((b - _c(_SQRT_HALF_BITS, ints)) >> _c(23, ints), lambda e: combine(b, e))

    def combine(b: Any, e: Any) -> Any:
        mantissa = _as(dtype, b - (e << _c(23, ints)))
        exponent = Cast(dtype, e) - Select(tiny, _c(23.0, dtype), _c(0.0, dtype))
        return _bind(exponent, lambda n: _bind(mantissa - _c(1.0, dtype), lambda f: finish(f, n)))

    def finish(f: Any, n: Any) -> Any:
        square = f * f
        tail = _horner(f, _LOG, dtype) * (square * f) - square * _c(0.5, dtype) + n * _c(_LN2_LOW, dtype)
        return (tail + f) + n * _c(_LN2_HIGH, dtype)

    inf = _c(float("inf"), dtype)
    finite = _bind(bits, split)
    special = Select(x == _c(0.0, dtype), _c(float("-inf"), dtype), Select(x == inf, inf, _c(float("nan"), dtype)))
    return Select((x > _c(0.0, dtype)) & (x < inf), finite, special)


_RULES: dict[str, Callable[[Any, str], Any]] = {
    "exp": _exp,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "erf": _erf,
    "log": _log,
}
