"""Global → shared copies inside a pipeline's async stage become `cp.async`, out-of-range elements filled with zeros.

TVM's own pass knows predicates for floating-point zeros only and spends a branch and a store on each; here the copy's
source size is 0 where the predicate fails, and the hardware writes the zeros. Another
constant (a zero point) is stored.
"""

from __future__ import annotations

from typing import Any

SIZES = (4, 8, 16)  # bytes that one cp.async moves


def inject_async_copy() -> Any:
    """The pass; to run on flat buffers after ThreadSync."""
    from tvm import tirx

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        import tvm_ffi

        state = _State()
        body = tvm_ffi.structural_mutate(func.body, [(tirx.AttrStmt, state.attribute), (tirx.BufferStore, state.store)])
        return func.with_body(body)

    return tirx.transform.prim_func_pass(run, opt_level=0, name="tvmx.InjectAsyncCopy")


class _State:
    def __init__(self) -> None:
        self._inside = 0

    def attribute(self, stmt: Any, mutator: Any) -> Any:
        if stmt.attr_key != "async_scope":
            return mutator.default_mutate(stmt)
        self._inside += 1
        body = mutator.mutate(stmt.body)
        self._inside -= 1
        return body

    def store(self, stmt: Any, mutator: Any) -> Any:
        if not self._inside or not str(stmt.buffer.scope()).startswith("shared"):
            return mutator.default_mutate(stmt)
        copy = _copy(stmt)
        return mutator.default_mutate(stmt) if copy is None else copy


def _copy(stmt: Any) -> Any | None:
    """The statement as one cp.async, or None when it is not a contiguous copy of 4, 8 or 16 bytes."""
    import tvm
    from tvm.ir.expr import TensorLoad

    value, condition, fill = stmt.value, None, 0
    if getattr(getattr(value, "op", None), "name", "") == "prim.if_then_else":
        condition, value, other = value.args
        constant = _word(other)
        if constant is None:
            return None
        fill = constant
    if not isinstance(value, TensorLoad) or str(value.source.scope()) != "global":
        return None
    destination, source = first_and_lanes(stmt.indices[0]), first_and_lanes(value.indices[0])
    if destination is None or source is None or destination[1] != source[1]:
        return None
    dtype = tvm.DataType(str(value.source.dtype))
    size = dtype.bits * dtype.lanes * source[1] // 8
    if size not in SIZES or str(stmt.buffer.dtype) != str(value.source.dtype):
        return None
    return _emit(stmt.buffer, destination[0], value.source, source[0], size, condition, fill)


def first_and_lanes(index: Any) -> tuple[Any, int] | None:
    """(first element, elements) of a scalar or unit-stride vector index."""
    import tvm.tirx as tirx

    if isinstance(index, tirx.Ramp):
        return (index.base, int(index.lanes)) if _value(index.stride) == 1 else None
    if isinstance(index, tirx.Add):
        for vector, scalar in ((index.a, index.b), (index.b, index.a)):
            if isinstance(vector, tirx.Ramp) and isinstance(scalar, tirx.Broadcast) and _value(vector.stride) == 1:
                return vector.base + scalar.value, int(vector.lanes)
        return None if _lanes(index) > 1 else (index, 1)
    return (index, 1) if _lanes(index) == 1 else None


def _lanes(expr: Any) -> int:
    import tvm

    return int(tvm.DataType(str(expr.ty.dtype)).lanes)


def _value(expr: Any) -> Any:
    return getattr(expr, "value", expr)


def _word(expr: Any) -> int | None:
    """A constant as the 32-bit word that repeats it; None for what is no constant, or a float other than zero."""
    import tvm
    import tvm.tirx as tirx

    inner = expr.value if isinstance(expr, tirx.Broadcast) else expr
    if isinstance(inner, tirx.FloatImm):
        return 0 if inner.value == 0 else None
    if not isinstance(inner, tirx.IntImm):
        return None
    bits = tvm.DataType(str(inner.ty.dtype)).bits
    code = int(inner.value) & ((1 << bits) - 1)
    word: int = sum(code << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word


def _emit(to: Any, at: Any, source: Any, first: Any, size: int, condition: Any, fill: int) -> Any:
    import tvm.tirx as tirx
    from tvm.backend.cuda.op import cuda_func_call

    kind = "cg" if size == 16 else "ca"
    name = f"tvmx_cp_async_{size}"
    arguments = [tirx.address_of(to[at]), tirx.address_of(source[first])]
    move = f'__asm__ __volatile__("cp.async.{kind}.shared.global [%0], [%1], %2'
    signature, before = "void* dst, const void* from", ""
    asm = f'{move};\\n" :: "r"(to), "l"(from), "n"({size}) : "memory");'
    if condition is not None and fill == 0:
        # Bytes past the source size are zeros; the address of a failed predicate is never read.
        name += "_zfill"
        arguments.append(tirx.Select(condition, tirx.const(size, "int32"), tirx.const(0, "int32")))
        asm = f'{move}, %3;\\n" :: "r"(to), "l"(from), "n"({size}), "r"(bytes) : "memory");'
        signature += ", int bytes"
    elif condition is not None:
        name += "_fill"
        arguments += [tirx.Cast("int32", condition), tirx.const(fill, "int32")]
        signature += ", int exists, int word"
        before = (
            f"  if (!exists) {{\n    for (int i = 0; i < {size // 4}; ++i) ((int*)dst)[i] = word;\n    return;\n  }}\n"
        )
    code = (
        f"\n__forceinline__ __device__ void {name}({signature}) {{\n{before}"
        f"  unsigned int to = __cvta_generic_to_shared(dst);\n  {asm}\n}}\n"
    )
    return tirx.Evaluate(cuda_func_call(name, *arguments, source_code=code))
