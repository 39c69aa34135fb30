"""Products and reductions of a model that is in 16 bits already accumulate in float32; the model's casts stay."""

from __future__ import annotations

from typing import Any

from tvmx.passes.precision.cast import with_out_dtype
from tvmx.passes.rewrite import RewriteRule, Scope, dtype_of, op_name, rewrite_pass
from tvmx.precision.kinds import DENSE, REDUCE, role_of

SHORT_DTYPES = ("float16", "bfloat16")
_EXACT = frozenset({"max", "min", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"})
_DTYPE_ATTR = frozenset({"cumsum", "cumprod", "image.resize2d"})  # would ask for the short result again


def wide(scope: Scope, call: Any) -> Any:
    """matmul(x: h, w: h): h  →  astype(matmul(x, w, out_dtype=float32), h); sum(x: h)  →  astype(sum(float32 x), h)."""
    import tvm
    from tvm import relax

    if not isinstance(call.ty, relax.TensorType) or dtype_of(call) not in SHORT_DTYPES:
        return None
    kind = op_name(call)
    if role_of(kind) == "dense":
        if str(call.attrs.out_dtype or "void") != "void":
            return None  # a plan asked for this accumulator
        made = with_out_dtype(call, list(call.args), "float32")
    elif kind in _DTYPE_ATTR and str(getattr(call.attrs, "dtype", None) or getattr(call.attrs, "out_dtype", "") or ""):
        return None
    else:
        args = [_widened(scope, a) for a in call.args]
        made = tvm.ir.Call(call.op, args, call.attrs, call.ty_args)
    return relax.op.astype(scope.emit(made), dtype_of(call))


def _widened(scope: Scope, operand: Any) -> Any:
    from tvm import relax

    short = isinstance(operand.ty, relax.TensorType) and dtype_of(operand) in SHORT_DTYPES
    return scope.emit(relax.op.astype(operand, "float32")) if short else operand


def accumulate_wide(mod: Any) -> Any:
    """The module with every such product and reduction widened; a program without 16-bit values is left alone."""
    return _PASS.get()(mod)


class _Pass:
    """The pass, made on first use because it needs TVM."""

    made: Any = None

    def get(self) -> Any:
        if self.made is None:
            roots = tuple(sorted((DENSE | REDUCE) - _EXACT))
            self.made = rewrite_pass("tvmx.AccumulateWide", (RewriteRule("wide", roots, wide),), cse=False)
        return self.made


_PASS = _Pass()
