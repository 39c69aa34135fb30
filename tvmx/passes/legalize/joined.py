"""Concatenation of 8-bit tensors: each part's runs are copied, where one expression would choose a part per byte."""

from __future__ import annotations

import math
from typing import Any

from tvmx.passes.legalize.conv import OPAQUE, static_shape
from tvmx.target import Target

BYTES = ("int8", "uint8")
MIN_PARALLEL = 1 << 19  # bytes


def concat(bb: Any, call: Any, target: Target) -> Any:
    """R.concat of 8-bit tensors of static shapes; None for others."""
    from tvm import relax

    parts = call.args[0]
    if isinstance(parts, relax.Var):
        parts = bb.lookup_binding(parts)
    shape = static_shape(call)
    if (
        not isinstance(parts, relax.Tuple)
        or call.attrs.axis is None
        or shape is None
        or str(call.ty.dtype) not in BYTES
        or 0 in shape
    ):
        return None
    shapes = [static_shape(p) for p in parts.fields]
    if any(s is None or 0 in s for s in shapes):
        return None
    axis = int(call.attrs.axis) % len(shape)
    runs = [math.prod(s[axis:]) for s in shapes if s is not None]
    outer = math.prod(shape[:axis])
    parallel = target.threads > 1 and outer > 1 and math.prod(shape) >= MIN_PARALLEL
    flat = [bb.emit(bb.normalize(relax.op.reshape(p, (outer * r,)))) for p, r in zip(parts.fields, runs)]
    made = bb.call_te(
        lambda *x: _kernel(list(x), outer, runs, parallel),
        *flat,
        primfunc_name_hint="concatenate_int8",
        primfunc_attrs={"op_pattern": OPAQUE},
    )
    return relax.op.reshape(bb.emit(made), shape)


def _kernel(parts: list[Any], outer: int, runs: list[int], parallel: bool) -> Any:
    from tvm.script.ir_builder import tirx as T

    from tvmx.frontend.kernels import extern

    total = sum(runs)

    def body(*views: Any) -> None:
        *sources, result = views
        with (T.parallel if parallel else T.serial)(0, outer) as i:
            start = 0
            for source, run in zip(sources, runs):
                with T.serial(0, run) as k:
                    result[i * total + start + k] = source[i * run + k]
                start += run

    return extern([(outer * total,)], [parts[0].dtype], parts, body, "concatenate")
