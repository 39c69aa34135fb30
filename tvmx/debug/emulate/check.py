"""Every kernel of a program for a CUDA target: emulated, against the unscheduled kernel on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.debug.emulate.run import KernelFault, emulate
from tvmx.debug.verify import Difference, compare
from tvmx.errors import CompileError
from tvmx.target import Target


@dataclass(frozen=True)
class KernelCheck:
    """One kernel on random inputs. `max_abs` and `max_rel` as in `PassCheck`; `error` is a fault or what it raised."""

    name: str
    rule: str
    max_abs: float
    max_rel: float
    ok: bool
    seconds: float
    conflicts: int = 0
    error: str | None = None

    def __str__(self) -> str:
        figures = self.error or f"max abs error {self.max_abs:.3g}, of the range {self.max_rel:.3g}"
        banks = f", {self.conflicts} bank conflicts" if self.conflicts else ""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.rule:18} {self.name}: {figures}{banks}"


def check_kernels(
    mod: Any, target: Target, progress: Callable[[KernelCheck], None] | None = None, seed: int = 0
) -> list[KernelCheck]:
    """Emulate each kernel of a lowered module under its default schedule for `target` (kind "cuda").

    The reference is the unscheduled kernel, compiled for the CPU: it shares no schedule, no thread and no intrinsic.
    """
    import tvm

    checks = []
    for var, func in mod.functions.items():
        if isinstance(func, tvm.tirx.PrimFunc):
            checks.append(_check(var.name_hint, func, target, seed))
            if progress is not None:
                progress(checks[-1])
    return checks


def _check(name: str, func: Any, target: Target, seed: int) -> KernelCheck:
    from tvmx.schedule import apply_default

    began = time.perf_counter()
    scheduled = apply_default(func, target)

    def outcome(worst: Difference, conflicts: int = 0, error: str | None = None) -> KernelCheck:
        seconds = time.perf_counter() - began
        return KernelCheck(name, scheduled.rule, worst.absolute, worst.of_range, worst.ok, seconds, conflicts, error)

    try:
        inputs, outputs = _operands(func, seed)
        done = emulate(scheduled.func, target, inputs)
        found = compare(list(done.outputs), _reference(func, inputs, outputs))
        return outcome(found, done.conflicts)
    except (KernelFault, CompileError) as fault:
        return outcome(Difference(math.inf, math.inf, False), error=str(fault))


def _operands(func: Any, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random inputs (the tensors that the kernel does not write), and arrays for its outputs."""
    from tvm import tirx

    from tvmx.api import _random_array
    from tvmx.schedule.tir import walk

    written: list[Any] = []
    walk(func.body, tirx.BufferStore, lambda s: written.append(s.buffer))
    rng = np.random.default_rng(seed)
    inputs, outputs = [], []
    for buffer in (p for p in func.params if hasattr(p.ty, "shape")):
        shape, dtype = tuple(_extent(e) for e in buffer.shape), str(buffer.dtype)
        if any(buffer.same_as(w) for w in written):
            outputs.append(np.zeros(shape, dtype))
        elif dtype in ("int8", "uint8"):
            low = np.iinfo(dtype)
            inputs.append(rng.integers(low.min, low.max, shape, endpoint=True).astype(dtype))
        else:
            inputs.append(_random_array(rng, shape, dtype))
    return inputs, outputs


def _extent(extent: Any) -> int:
    if hasattr(extent, "value"):
        return int(extent.value)
    raise CompileError(f"a kernel of symbolic shape ({extent}) is not emulated: fix the model's shapes")


def _reference(func: Any, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> list[np.ndarray]:
    import tvm

    built = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), tvm.target.Target("llvm"))
    tensors = [tvm.runtime.tensor(o) for o in outputs]
    built["main"](*[tvm.runtime.tensor(a) for a in inputs], *tensors)
    return [t.numpy() for t in tensors]
