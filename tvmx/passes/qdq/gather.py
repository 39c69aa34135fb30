"""Look-ups in quantised tables: codes are picked first, and only what was picked becomes floats.

gather(dequantize(codes), i)          →  dequantize(gather(codes, i))                        one scale
gather(scale · (codes - zero), i)     →  scale[row] · (codes[row] - zero[row])               a scale per row, one kernel

An embedding that is stored in 8 bits would otherwise be written as a whole in float32 at every run.
"""

from __future__ import annotations

from typing import Any

from tvmx.passes.constants import as_constant
from tvmx.passes.precision.moves import moved_operand
from tvmx.passes.qdq.params import RANGE, Dequantized, dequantized, emit_dequantize
from tvmx.passes.qdq.weight_only import ScaledCodes, scaled_codes
from tvmx.passes.rewrite import Refusal, RewriteRule, Scope, dtype_of, op_name


def gather_codes(scope: Scope, call: Any) -> Any:
    """A kernel of the importer that picks elements of a dequantised tensor or of scaled constant codes."""
    from tvm import relax

    if not isinstance(call.ty, relax.TensorType) or dtype_of(call) != "float32" or len(call.args) != 2:
        return None
    if not isinstance(call.args[1], relax.Tuple):
        return None
    operands = list(call.args[1].fields)
    if not any(op_name(scope.definition(o)) in ("dequantize", "multiply", "subtract", "astype") for o in operands):
        return None
    found = moved_operand(scope.mod, call)
    if found is None:
        return None
    position, kernel = found
    name = str(call.args[0].name_hint)
    source = dequantized(scope, operands[position])
    if isinstance(source, Refusal):
        return source
    if isinstance(source, Dequantized) and source.params.per_tensor and source.params.dtype in RANGE:
        operands[position] = source.codes
        moved = scope.emit(scope.kernel(kernel, *operands, name=name))
        return emit_dequantize(moved, source.params, dtype_of(call))
    table = scaled_codes(scope, operands[position])
    if table is None:
        return None if source is None else Refusal("the table is computed and scaled per channel")
    return _scaled(scope, table, position, operands, kernel, name)


def _scaled(scope: Scope, table: ScaledCodes, position: int, operands: list[Any], kernel: Any, name: str) -> Any:
    centred = bool(table.zero.any())
    count = len(operands)
    operands[position] = as_constant(table.codes)
    extra = [as_constant(table.scale), *([as_constant(table.zero)] if centred else [])]

    def compute(*tensors: Any) -> Any:
        scale, *zero = tensors[count:]

        def read(codes: Any, where: tuple[Any, ...]) -> Any:
            value = codes(*where).astype("float32")
            if zero:
                value = value - _broadcast(zero[0], where)
            return value * _broadcast(scale, where)

        return kernel(*tensors[:count], read=read)

    return scope.kernel(compute, *operands, *extra, name=name)


def _broadcast(tensor: Any, where: tuple[Any, ...]) -> Any:
    """The element of a tensor whose axes of extent 1 serve every index."""
    return tensor(*(0 if int(extent) == 1 else i for extent, i in zip(tensor.shape, where)))


RULES = (RewriteRule("gather_codes", ("call_tir",), gather_codes),)
