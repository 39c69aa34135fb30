"""Small helpers over TensorIR that TVM's Python API lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def walk(node: Any, node_type: type, visit: Callable[[Any], None]) -> None:
    """Call `visit` on every `node_type` node below `node`, in program order."""
    import tvm_ffi

    tvm_ffi.structural_walk(node, [(node_type, visit)])


def substitute(expr: Any, mapping: list[tuple[Any, Any]]) -> Any:
    """`expr` with each variable replaced by its value."""
    import tvm_ffi
    from tvm.ir import Var

    def replace(var: Any, mutator: Any) -> Any:
        for old, new in mapping:
            if var.same_as(old):
                return new
        return var

    return tvm_ffi.structural_mutate(expr, [(Var, replace)])
