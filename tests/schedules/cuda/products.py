"""Small Relax programs on Tensor Cores: built by the pipeline, emulated kernel by kernel; numpy references."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  # numpy's dtype "bfloat16"
import numpy as np

from tvmx.target import Target


@dataclass(frozen=True)
class Convolution:
    """x is (N, H, W, C), weights (kh, kw, C / groups, out); bias and ReLU follow."""

    x: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "float16"
    epilogue: str = "relu"  # "relu" | "residual" | "requantize"
    constant: bool = True

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(5)
        w = (*self.kernel, self.x[3] // self.groups, self.out)
        if self.dtype == "int8":
            x, weight = rng.integers(-100, 100, self.x), rng.integers(-20, 20, w)
        else:
            x, weight = rng.integers(-4, 5, self.x) / 4, rng.integers(-4, 5, w) / 8
        bias = rng.integers(-3, 4, self.out)
        wide = "int32" if self.dtype == "int8" else self.dtype
        return {"x": x.astype(self.dtype), "w": weight.astype(self.dtype), "b": bias.astype(wide)}

    def inputs(self) -> list[np.ndarray]:
        a = self.arrays()
        return [a["x"]] if self.constant else [a["x"], a["w"]]

    def module(self) -> Any:
        from tvm import relax

        a, op = self.arrays(), relax.op
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType(self.x, self.dtype))
        w = relax.const(a["w"]) if self.constant else relax.Var("w", relax.TensorType(a["w"].shape, self.dtype))
        with builder.function("main", [x] if self.constant else [x, w]):
            with builder.dataflow():
                y = builder.emit(
                    op.nn.conv2d(
                        x, w, strides=list(self.strides), padding=list(self.pads), dilation=list(self.dilation),
                        groups=self.groups, data_layout="NHWC", kernel_layout="HWIO",
                        out_dtype="int32" if self.dtype == "int8" else None,
                    )
                )  # fmt: skip
                y = builder.emit(op.add(y, relax.const(a["b"].reshape(1, 1, 1, -1))))
                if self.epilogue == "relu":
                    y = builder.emit(op.nn.relu(y))
                if self.epilogue == "residual":
                    y = builder.emit(op.add(y, x))
                if self.epilogue == "requantize":
                    y = builder.emit(op.astype(y, "float32"))
                    y = builder.emit(op.multiply(y, relax.const(np.float32(2**-8))))
                    y = builder.emit(op.clip(builder.emit(op.round(y)), -128, 127))
                    y = builder.emit(op.astype(y, "int8"))
                y = builder.emit_output(y)
            builder.emit_func_output(y)
        return builder.get()

    def reference(self) -> np.ndarray:
        a = {k: v.astype("float64") for k, v in self.arrays().items()}
        top, left, bottom, right = self.pads
        x = np.pad(a["x"], ((0, 0), (top, bottom), (left, right), (0, 0)))
        kh, kw, depth, out = a["w"].shape
        (sh, sw), (dh, dw) = self.strides, self.dilation
        oh, ow = (x.shape[1] - (kh - 1) * dh - 1) // sh + 1, (x.shape[2] - (kw - 1) * dw - 1) // sw + 1
        y = np.zeros((x.shape[0], oh, ow, out))
        mine = out // self.groups
        for g in range(self.groups):
            into = slice(g * mine, (g + 1) * mine)
            for i in range(kh):
                for j in range(kw):
                    part = x[:, i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw]
                    y[..., into] += part[..., g * depth : (g + 1) * depth] @ a["w"][i, j][:, into]
        y += a["b"]
        if self.epilogue == "relu":
            return np.maximum(y, 0)
        if self.epilogue == "residual":
            return y + a["x"]
        return np.clip(np.round(y / 256), -128, 127)


@dataclass(frozen=True)
class Product:
    """a @ b, b constant or an input, then a bias."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: str = "float16"
    constant: bool = True
    transpose_b: bool = False

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(9)
        if self.dtype == "int8":
            return rng.integers(-100, 100, self.a).astype("int8"), rng.integers(-100, 100, self.b).astype("int8")
        return (rng.integers(-4, 5, self.a) / 4).astype(self.dtype), (rng.integers(-4, 5, self.b) / 4).astype(
            self.dtype
        )

    def inputs(self) -> list[np.ndarray]:
        a, b = self.arrays()
        return [a] if self.constant else [a, b]

    def module(self) -> Any:
        from tvm import relax

        _, array = self.arrays()
        builder = relax.BlockBuilder()
        a = relax.Var("a", relax.TensorType(self.a, self.dtype))
        b = relax.const(array) if self.constant else relax.Var("b", relax.TensorType(self.b, self.dtype))
        with builder.function("main", [a] if self.constant else [a, b]):
            with builder.dataflow():
                right = b
                if self.transpose_b:
                    axes = [*range(len(self.b) - 2), len(self.b) - 1, len(self.b) - 2]
                    right = builder.emit(relax.op.permute_dims(b, axes))
                wide = "int32" if self.dtype == "int8" else None
                y = builder.emit(relax.op.matmul(a, right, out_dtype=wide))
                y = builder.emit_output(builder.emit(relax.op.add(y, relax.const(np.array(2, wide or self.dtype)))))
            builder.emit_func_output(y)
        return builder.get()

    def reference(self) -> np.ndarray:
        a, b = (v.astype("float64") for v in self.arrays())
        return a @ (np.swapaxes(b, -1, -2) if self.transpose_b else b) + 2


@dataclass
class Outcome:
    """The program's output and, for each kernel, its rule and what the emulator counted."""

    output: np.ndarray
    rules: list[str] = field(default_factory=list)
    conflicts: int = 0
    copies: int = 0


def run(case: Convolution | Product, target: Target, reverse: bool = False) -> Outcome:
    """Pipeline, default schedules, emulation of each kernel in turn."""
    import tvm
    from tvm import relax

    from tvmx.debug.emulate import emulate
    from tvmx.pipeline import run_phases
    from tvmx.schedule import apply_default

    mod = run_phases(case.module(), target)
    main = mod["main"]
    values: dict[Any, Any] = dict(zip(main.params, case.inputs()))

    def value(expr: Any) -> np.ndarray:
        if isinstance(expr, tvm.ir.Call):  # a view
            assert expr.op.name == "relax.reshape"
            return values[expr.args[0]].reshape([int(d) for d in expr.ty.shape])
        return values[expr] if isinstance(expr, relax.Var) else expr.value.numpy()

    outcome = Outcome(np.zeros(0))
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, tvm.ir.Call) and call.op.name == "relax.call_tir":
                scheduled = apply_default(mod[call.args[0]], target)
                done = emulate(scheduled.func, target, [value(a) for a in call.args[1].fields], reverse)
                values[binding.var] = done.outputs[0]
                outcome.rules.append(scheduled.rule)
                outcome.conflicts += done.conflicts
                outcome.copies += done.copies
            else:
                values[binding.var] = value(call)
    outcome.output = value(main.body.body)
    return outcome


def check(case: Convolution | Product, target: Target, reverse: bool = False) -> Outcome:
    """Run, and compare: integers exactly, 16-bit floats within one rounding of the range."""
    outcome = run(case, target, reverse)
    expected = case.reference()
    assert outcome.output.shape == expected.shape
    error = np.abs(outcome.output.astype("float64") - expected).max()
    ulp = {"int8": 0, "bfloat16": 2**-7}.get(case.dtype, 2**-10)
    assert error <= ulp * np.abs(expected).max(), f"{case} on {target.name}: {error}"
    return outcome
