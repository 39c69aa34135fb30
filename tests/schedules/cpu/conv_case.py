"""One convolution as a Relax module over NHWC, built by the pipeline, and its numpy reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.target import Target


@dataclass(frozen=True)
class Case:
    """x is (N, H, W, C); `pads` (top, left, bottom, right); `constant` False makes the weight an input."""

    x: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    prologue: bool = False  # x is scaled per channel first, as squeeze-and-excite does
    epilogue: str = "relu"  # "" | "relu" | "hardswish" | "residual"
    constant: bool = True

    def arrays(self) -> tuple[Any, Any, Any]:
        """(x, weight HWIO, bias), seeded."""
        rng = np.random.default_rng(7)
        depth = self.x[3] // self.groups
        weight = rng.standard_normal((*self.kernel, depth, self.out)) / np.sqrt(depth * np.prod(self.kernel))
        return tuple(a.astype("float32") for a in (rng.standard_normal(self.x), weight, rng.standard_normal(self.out)))

    def module(self) -> Any:
        from tvm import relax

        _, w, b = self.arrays()
        builder = relax.BlockBuilder()
        data = x = relax.Var("x", relax.TensorType(self.x, "float32"))
        weight = relax.const(w) if self.constant else relax.Var("w", relax.TensorType(w.shape, "float32"))
        with builder.function("main", [x] if self.constant else [x, weight]):
            with builder.dataflow():
                if self.prologue:
                    data = builder.emit(relax.op.multiply(x, relax.const(self.scales())))
                y = builder.emit(
                    relax.op.nn.conv2d(
                        data,
                        weight,
                        strides=list(self.strides),
                        padding=list(self.pads),
                        dilation=list(self.dilation),
                        groups=self.groups,
                        data_layout="NHWC",
                        kernel_layout="HWIO",
                    )
                )
                y = builder.emit(relax.op.add(y, relax.const(b.reshape(1, 1, 1, -1))))
                if self.epilogue == "relu":
                    y = builder.emit(relax.op.nn.relu(y))
                if self.epilogue == "hardswish":
                    z = builder.emit(relax.op.clip(builder.emit(relax.op.add(y, relax.const(np.float32(3)))), 0, 6))
                    z = builder.emit(relax.op.multiply(y, z))
                    y = builder.emit(relax.op.divide(z, relax.const(np.float32(6))))
                if self.epilogue == "residual":
                    y = builder.emit(relax.op.add(y, x))
                y = builder.emit_output(y)
            builder.emit_func_output(y)
        return builder.get()

    def reference(self) -> Any:
        """float64 numpy result."""
        x, w, b = (a.astype("float64") for a in self.arrays())
        data = x * self.scales() if self.prologue else x
        n, h, width, _ = self.x
        kh, kw, depth, out = w.shape
        top, left, bottom, right = self.pads
        x_padded = np.pad(data, ((0, 0), (top, bottom), (left, right), (0, 0)))
        oh = (h + top + bottom - (kh - 1) * self.dilation[0] - 1) // self.strides[0] + 1
        ow = (width + left + right - (kw - 1) * self.dilation[1] - 1) // self.strides[1] + 1
        y = np.zeros((n, oh, ow, out))
        per_group = out // self.groups
        for g in range(self.groups):
            into = slice(g * per_group, (g + 1) * per_group)
            for i in range(kh):
                for j in range(kw):
                    top_row, first = i * self.dilation[0], j * self.dilation[1]
                    window = x_padded[
                        :,
                        top_row : top_row + (oh - 1) * self.strides[0] + 1 : self.strides[0],
                        first : first + (ow - 1) * self.strides[1] + 1 : self.strides[1],
                        g * depth : (g + 1) * depth,
                    ]
                    y[..., into] += window @ w[i, j][:, into]
        y += b
        if self.epilogue == "relu":
            y = np.maximum(y, 0)
        if self.epilogue == "hardswish":
            y = y * np.clip(y + 3, 0, 6) / 6
        if self.epilogue == "residual":
            y = y + x
        return y

    def scales(self) -> Any:
        return np.linspace(0.5, 1.5, self.x[3], dtype="float32").reshape(1, 1, 1, -1)


def build(module: Any, target: Target) -> tuple[Any, list[str]]:
    """Pipeline, default schedules, LLVM. Returns (executable, names of the rules used)."""
    import tvm
    from tvm import tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import apply_default

    module = run_phases(module, target)
    rules = []
    for var, function in list(module.functions.items()):
        if isinstance(function, tirx.PrimFunc):
            scheduled = apply_default(function, target)
            rules.append(scheduled.rule)
            module[var] = scheduled.func.with_attr("global_symbol", var.name_hint)
    return tvm.compile(module, target.tvm()), rules


def run(case: Case, target: Target) -> tuple[float, list[str]]:
    """(max error relative to the output's range, rules used)."""
    import tvm
    from tvm import relax

    executable, rules = build(case.module(), target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    x, w, _ = case.arrays()
    inputs = [tvm.runtime.tensor(a) for a in ((x,) if case.constant else (x, w))]
    got = machine["main"](*inputs).numpy()
    expected = case.reference()
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max()), rules
