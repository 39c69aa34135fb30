"""Small lowered modules that every tuning test shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def matmul(n: int = 64, m: int = 32, k: int = 48, name: str = "matmul") -> Any:
    """max(A[n, k] · B[k, m], 0) as an unscheduled PrimFunc."""
    from tvm import te

    a = te.placeholder((n, k), name="A")
    b = te.placeholder((k, m), name="B")
    r = te.reduce_axis((0, k), "r")
    c = te.compute((n, m), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C")
    d = te.compute((n, m), lambda i, j: te.max(c[i, j], 0.0), name="D")
    return te.create_prim_func([a, b, d]).with_attr("global_symbol", name)


def module(calls: int = 1) -> Any:
    """A lowered Relax module that calls one matmul kernel `calls` times and one addition once."""
    import tvm
    from tvm import relax, te

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 64), "float32"))
    w = relax.Var("w", relax.TensorType((64, 64), "float32"))
    kernel = builder.add_func(matmul(64, 64, 64).without_attr("global_symbol"), "matmul")
    a = te.placeholder((64, 64), name="A")
    add = te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[i, j] + 1.0, name="add")])
    plus = builder.add_func(add.without_attr("global_symbol"), "add_one")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = x
            for _ in range(calls):
                y = builder.emit(relax.call_tir(kernel, (y, w), x.ty))
            y = builder.emit(relax.call_tir(plus, (y,), x.ty))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    mod = builder.get()
    assert isinstance(mod, tvm.IRModule)
    return mod


class FakeMeasurer:
    """Stands in for `Measurer`: no processes, times that follow from the schedule, failures on demand."""

    def __init__(self, target: Any, config: Any = None, *_: Any) -> None:
        from tvmx.tune.measure import MeasureConfig

        self.config = config or MeasureConfig()
        self.built: list[Any] = []

    def __enter__(self) -> FakeMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def cost(self, func: Any) -> float:
        """Seconds between 1 and 2 ms."""
        from tvmx.tune.apply import schedule_hash

        return 1e-3 * (1 + int(schedule_hash(func), 16) % 1000 / 1000)

    def build(self, funcs: Any, stop: Any = None) -> list[Any]:
        from tvmx.tune.measure import Built

        self.built += funcs
        start = len(self.built) - len(funcs)
        return [Built(Path(f"/nowhere/{start + i}")) for i in range(len(funcs))]

    def func(self, built: Any) -> Any:
        return self.built[int(built.path.name)]

    def trial(self, func: Any, reference: Any, built: Any, give_up_s: float, seed: int = 0) -> Any:
        from tvmx.tune.measure import Outcome

        return Outcome("OK", ((self.cost(self.func(built)),) * 3,))

    def compare(self, func: Any, builds: Any, seed: int) -> Any:
        from tvmx.tune.measure import Outcome

        return Outcome("OK", tuple((self.cost(self.func(b)),) * 3 for b in builds))
