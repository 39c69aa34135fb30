"""The guard against LLVM 22's loop vectoriser, which miscompiles some indices modulo a power of two.

`i % 4` becomes `zext(trunc i to i2)`, which the vectoriser takes for an affine access once it has checked that the two
bits do not wrap, and that check is lost: `x[i % 3, j % 4, k % 5]` reads past `x` on AVX-512. The few kernels that hold
such an index in a loop that the vectoriser may see are built without it; our schedules vectorise explicitly. The others
keep it: it is good at gathers and masked copies (Pad takes 2.7 times as long without it).

LLVM's options belong to the process. TVM sets those of a target while it generates code for it and puts back what it
found, so code generation with an option runs alone, and any number without one side by side. The first call of a module
in this process generates code too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tvmx.schedule.tir import walk

OPTION = "-vectorize-loops:bool=false"

# Iterations of the loops inside a loop that LLVM may unroll away, so that it becomes the innermost one.
MAX_UNROLLED = 1024


def guarded_target(target: Any) -> Any:
    """A `tvm.target.Target` that generates code without the loop vectoriser."""
    import tvm

    return tvm.target.Target({**target.export(), "cl-opt": [OPTION]})


def is_at_risk(func: Any) -> bool:
    """Whether a lowered PrimFunc computes an integer modulo an even number from a loop that LLVM may vectorise.

    `x & 3` and a cast to 8 or 16 bits are such remainders too; of what is loaded from memory they do no harm.
    """
    from tvm import tirx
    from tvm.ir.prim.expr import BitwiseAnd

    suspects: list[Any] = []
    varying: set[Any] = set()

    def loop(node: Any) -> None:
        if node.kind != tirx.ForKind.VECTORIZED and _iterations(node.body) <= MAX_UNROLLED:
            varying.add(node.loop_var)

    def modulo(node: Any) -> None:
        if not isinstance(node.b, tirx.IntImm) or node.b.value % 2 == 0:
            suspects.append(node.a)

    def cast(node: Any) -> None:
        if str(node.ty.dtype) in _NARROW and str(node.value.ty.dtype).startswith(("int", "uint")):
            suspects.append(node.value)

    walk(func.body, tirx.Mod, modulo)
    walk(func.body, tirx.FloorMod, modulo)
    walk(func.body, BitwiseAnd, suspects.append)
    walk(func.body, tirx.Cast, cast)
    if not suspects:
        return False
    walk(func.body, tirx.For, loop)
    walk(func.body, tirx.Bind, lambda node: varying.add(node.var) if _varies(node.value, varying) else None)
    return any(_varies(expr, varying) for expr in suspects)


_NARROW = ("int8", "uint8", "int16", "uint16")


def _iterations(body: Any) -> int:
    """Iterations of all loops in `body`, one after the other or nested; a large number where they are not known."""
    from tvm import tirx

    total = 1

    def count(node: Any) -> None:
        nonlocal total
        total *= node.extent.value if isinstance(node.extent, tirx.IntImm) else MAX_UNROLLED + 1

    walk(body, tirx.For, count)
    return total


def _varies(expr: Any, varying: set[Any]) -> bool:
    """Whether `expr` depends on one of the variables, other than through an address."""
    import tvm_ffi
    from tvm.ir import Var
    from tvm.ir.expr import TensorLoad

    found: list[bool] = []

    def load(node: Any) -> Any:
        return tvm_ffi.WalkResult.SKIP

    def variable(node: Any) -> Any:
        found.append(node in varying)
        return tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(expr, [(TensorLoad, load), (Var, variable)], order="pre")
    return any(found)


class _Gate:
    """Any number of users inside `shared`, or one inside `alone`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:  # held throughout: nobody enters
            self._changed.wait_for(lambda: not self._inside)
            yield


_GATE = _Gate()


def llvm_options(guarded: bool) -> Any:
    """Context for whatever makes LLVM generate code: alone in the process when `guarded`."""
    return _GATE.alone() if guarded else _GATE.shared()
