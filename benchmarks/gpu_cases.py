"""What `benchmarks.gpu` measures: numpy inputs and references; which part is timed against which library.

Standard library and numpy only: this module travels with the prepared folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One convolution (NHWC × HWIO) or matrix product.

    `kind` "conv": x is (N, H, W, C), `weight` (kh, kw, C / groups, out), a bias and ReLU (int8: requantisation)
    follow. `kind` "gemm": a @ b of the shapes `x` and `weight`, both given at run time, nothing follows.
    """

    name: str
    kind: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    dtype: str = "float16"
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    timed: bool = True  # else only its numbers are checked
    transposed: bool = False  # of a gemm: b is [n, k]
    rule: str = ""  # the schedule rule, where it is not the default

    @property
    def output(self) -> tuple[int, ...]:
        if self.kind == "gemm":
            return (*self.x[:-1], self.weight[-2] if self.transposed else self.weight[-1])
        n, h, w, _ = self.x
        kh, kw, _, out = self.weight
        return (n, self._side(h, kh), self._side(w, kw), out)

    @property
    def flops(self) -> int:
        depth = self.x[-1] if self.kind == "gemm" else math.prod(self.weight[:3])
        return 2 * math.prod(self.output) * depth

    def _side(self, size: int, kernel: int) -> int:
        return (size + 2 * self.pad - (kernel - 1) * self.dilation - 1) // self.stride + 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Case:
        return cls(**{**obj, "x": tuple(obj["x"]), "weight": tuple(obj["weight"])})


def storage(dtype: str) -> Any:
    return np.dtype({"float16": np.float16, "int8": np.int8, "bfloat16": np.uint16}[dtype])


def small(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Whole numbers -4 … 4: sums of their products are exact in every dtype that is used."""
    return np.random.default_rng(seed).integers(-4, 5, shape, dtype=np.int8)


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Whole numbers in the case's own dtype; floats are a quarter of them, int8 eight times."""
    if dtype == "int8":
        return (values * 8).astype(np.int8)
    quarter = (values.astype(np.float32) / 4).astype(np.float32)
    if dtype == "bfloat16":
        return np.ascontiguousarray((quarter.view(np.uint32) >> 16).astype(np.uint16))
    return quarter.astype(np.float16)


def number(values: np.ndarray, dtype: str) -> np.ndarray:
    """An array in the case's dtype as float64."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def reference(case: Case, x: np.ndarray, weight: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The chosen output rows (flat index over all but the last axis) in float64, before rounding to the dtype."""
    a, w = number(x, case.dtype), number(weight, case.dtype)
    if case.kind == "gemm":
        inner = case.output[-2]
        batch, row = rows // inner, rows % inner
        if w.ndim == 2:
            w = w[None]
        a = a.reshape(-1, case.x[-2], case.x[-1])
        found = [a[b, r] @ (w[b % len(w)].T if case.transposed else w[b % len(w)]) for b, r in zip(batch, row)]
        return np.stack(found)
    _, oh, ow, out = case.output
    kh, kw, depth, _ = case.weight
    mine = out // case.groups
    padded = np.pad(a, ((0, 0), (case.pad,) * 2, (case.pad,) * 2, (0, 0)))
    image, y, z = rows // (oh * ow), rows // ow % oh * case.stride, rows % ow * case.stride
    total = np.zeros((len(rows), out))
    for g in range(case.groups):
        for i in range(kh):
            for j in range(kw):
                part = padded[image, y + i * case.dilation, z + j * case.dilation, g * depth : (g + 1) * depth]
                total[:, g * mine : (g + 1) * mine] += part @ w[i, j][:, g * mine : (g + 1) * mine]
    if case.dtype == "int8":
        return np.clip(np.rint((total + 1) / 256), -128, 127)
    return np.maximum(total + 1, 0)


def worst_error(case: Case, found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """(largest error, what one rounding to the output's dtype may amount to)."""
    wide = case.kind == "gemm" and case.dtype == "int8"
    got = found.astype(np.float64) if wide else number(found, case.dtype)
    error = float(np.abs(got - expected).max(initial=0.0))
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 0.0}[case.dtype]
    return error, ulp * float(np.abs(expected).max(initial=0.0))


def conv(name: str, x: tuple[int, ...], out: int, kernel: int, stride: int = 1, **options: Any) -> Case:
    """A square convolution, padded so that stride alone shrinks the image."""
    groups, dilation = options.get("groups", 1), options.get("dilation", 1)
    pad = options.pop("pad", (kernel - 1) * dilation // 2)
    return Case(name, "conv", x, (kernel, kernel, x[3] // groups, out), stride=stride, pad=pad, **options)


def resnet50(batch: int, dtype: str = "float16") -> list[Case]:
    """The distinct convolutions of ResNet-50 at 224 × 224."""
    layers = [(224, 3, 64, 7, 2), (56, 64, 64, 1, 1), (56, 64, 64, 3, 1), (56, 64, 256, 1, 1), (56, 256, 64, 1, 1)]
    size, before = 56, 256
    for width in (128, 256, 512):
        layers += [(size, before, width, 1, 1), (size, width, width, 3, 2), (size, before, 4 * width, 1, 2)]
        size //= 2
        layers += [(size, width, 4 * width, 1, 1), (size, 4 * width, width, 1, 1), (size, width, width, 3, 1)]
        before = 4 * width
    kind = "" if dtype == "float16" else f" {dtype}"
    return [
        conv(f"resnet50{kind} {k}x{k}/{s} {c}->{o} @{h}", (batch, h, h, c), o, k, s, dtype=dtype)
        for h, c, o, k, s in layers
    ]


def gemm(m: int, n: int, k: int, dtype: str = "float16") -> Case:
    return Case(f"gemm {dtype} {m}x{n}x{k}", "gemm", (m, k), (k, n), dtype)


def families() -> list[Case]:
    """Small shapes of every schedule family, odd sizes among them; checked, not timed."""
    found = [
        conv("conv 3x3", (2, 14, 14, 64), 64, 3, timed=False),
        conv("conv 1x1 odd", (2, 9, 7, 24), 33, 1, timed=False),
        conv("conv stem", (1, 32, 32, 3), 32, 7, 2, timed=False),
        conv("conv dilated", (1, 14, 14, 32), 64, 3, dilation=2, timed=False),
        conv("conv grouped", (1, 10, 10, 64), 64, 3, groups=2, timed=False),
        conv("conv split k", (1, 7, 7, 256), 64, 3, timed=False),
        conv("conv int8", (2, 14, 14, 64), 48, 3, dtype="int8", timed=False),
        Case("gemm odd", "gemm", (45, 77), (77, 33), timed=False),
        Case("gemm batch", "gemm", (3, 40, 64), (3, 64, 48), timed=False),
        Case("gemm batch transposed", "gemm", (3, 40, 64), (3, 48, 64), timed=False, transposed=True),
        Case("gemm bf16", "gemm", (64, 96), (96, 72), "bfloat16", timed=False),
        Case("gemm int8", "gemm", (64, 128), (96, 128), dtype="int8", timed=False, transposed=True),
    ]
    return found


def all_cases(batch: int = 32, sm: int = 80) -> list[Case]:
    """Everything, what a bar is set on first."""
    if sm == 90:
        shapes = [
            ((256, 256), (384, 256), False),
            ((8192, 8192), (8192, 8192), True),
            ((4096, 4096), (4096, 4096), True),
        ]
        hopper = [
            Case(
                f"gemm float16 {m}x{n}x{k} wgmma",
                "gemm",
                (m, k),
                (n, k),
                timed=timed,
                transposed=True,
                rule="cuda.wgmma",
            )
            for (m, k), (n, _), timed in shapes
        ]
        return [*hopper, *all_cases(batch)]
    large = [gemm(8192, 8192, 8192), gemm(4096, 4096, 4096), gemm(4096, 4096, 4096, "bfloat16"), gemm(1024, 1024, 1024)]
    bert = [gemm(4096, 768, 768), gemm(4096, 3072, 768), gemm(4096, 768, 3072)]
    whole = [gemm(4096, 4096, 4096, "int8")]
    return [*families(), *large, *resnet50(batch), *bert, *whole, *resnet50(batch, "int8")[1:4]]
