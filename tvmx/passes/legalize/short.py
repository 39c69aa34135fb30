"""Products with 16-bit operands on a CPU: constant weights stay in 16 bits and are widened in the kernel, everything
else is widened before it; float32 accumulates.
"""

from __future__ import annotations

from typing import Any

SHORT = ("float16", "bfloat16")
FLOATS = ("float32", *SHORT)


def dtype_of(value: Any) -> str:
    return str(value.ty.dtype)


def is_float_product(call: Any) -> bool:
    """float32 made of two operands of float32, float16 or bfloat16, in any mixture."""
    return dtype_of(call) == "float32" and all(dtype_of(x) in FLOATS for x in call.args[:2])


def widened(bb: Any, value: Any) -> Any:
    """The operand in float32; the cast of a computed value fuses into the kernel that makes it."""
    from tvm import relax

    if dtype_of(value) not in SHORT:
        return value
    cast = bb.normalize(relax.op.astype(value, "float32"))
    return bb.emit(cast.op.get_attr("FLegalize")(bb, cast))


def weight_of(bb: Any, value: Any) -> Any:
    """The second operand: a constant as it is, anything else in float32."""
    from tvm import ir, relax

    bound = bb.lookup_binding(value) if isinstance(value, relax.Var) else value
    return value if isinstance(bound, ir.GenericConst) else widened(bb, value)
