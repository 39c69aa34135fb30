"""Building, running and checking small quantised programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmx.pipeline import fuse, lower, qdq
from tvmx.schedule import apply_default
from tvmx.target import PRESETS, Target, cpu_features, resolve

HOSTS = [t for t in PRESETS.values() if t.kind == "cpu" and t.arch == "x86_64" and t.features <= cpu_features()]
"""The x86 presets that this machine can run."""


def native(threads: int = 1) -> Target:
    return resolve("native", threads=threads)


def module(params: Sequence[tuple[Sequence[int], str]], body: Callable[..., Any]) -> Any:
    """`main(*params)` returning `body(emit, *params)`."""
    builder = relax.BlockBuilder()
    variables = [relax.Var(f"x{i}", relax.TensorType(list(s), d)) for i, (s, d) in enumerate(params)]

    def emit(expr: Any) -> Any:
        return builder.emit(builder.normalize(expr))

    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(body(emit, *variables)))
        builder.emit_func_output(result)
    return builder.get()


def passes(mod: Any, target: Target, *phases: Any) -> Any:
    """`mod` after these phases."""
    with target.tvm(), tvm.transform.PassContext(opt_level=3):
        for phase in phases:
            mod = tvm.transform.Sequential(phase(target))(mod)
    return mod


def run(mod: Any, target: Target, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """(the result of the program compiled with our schedules, the schedule rules in use)."""
    mod = passes(mod, target, qdq, lower, fuse)
    rules = []
    for gv, func in mod.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            scheduled = apply_default(func, target)
            rules.append(scheduled.rule)
            mod[gv] = scheduled.func.with_attr("global_symbol", gv.name_hint)
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        executable = tvm.compile(mod, target.tvm())
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(a) for a in arrays))
    return result.numpy(), rules


def codes(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Random codes over the dtype's whole range, both ends included."""
    info = np.iinfo(dtype)
    array = rng.integers(info.min, info.max + 1, shape).astype(dtype)
    flat = array.reshape(-1)
    flat[: max(1, flat.size // 3)] = rng.choice([info.min, info.max], max(1, flat.size // 3))
    return array


def conv_sums(
    x: np.ndarray,
    w: np.ndarray,
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    fill: int = 0,
) -> np.ndarray:
    """Integer NHWC × HWIO convolution in int64; `fill` lies around the image."""
    n, h, width, c = x.shape
    kh, kw, mine, out = w.shape
    padded = np.full((n, h + pads[0] + pads[2], width + pads[1] + pads[3], c), fill, np.int64)
    padded[:, pads[0] : pads[0] + h, pads[1] : pads[1] + width] = x
    oh = (padded.shape[1] - (kh - 1) * dilation[0] - 1) // strides[0] + 1
    ow = (padded.shape[2] - (kw - 1) * dilation[1] - 1) // strides[1] + 1
    y = np.zeros((n, oh, ow, out), np.int64)
    each = out // groups
    for g in range(groups):
        for a in range(kh):
            for b in range(kw):
                rows = slice(a * dilation[0], a * dilation[0] + (oh - 1) * strides[0] + 1, strides[0])
                columns = slice(b * dilation[1], b * dilation[1] + (ow - 1) * strides[1] + 1, strides[1])
                part = padded[:, rows, columns, g * mine : (g + 1) * mine]
                weights = w[a, b, :, g * each : (g + 1) * each].astype(np.int64)
                y[..., g * each : (g + 1) * each] += np.einsum("nhwc,co->nhwo", part, weights)
    return y
