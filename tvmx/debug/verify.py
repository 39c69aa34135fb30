"""Which pass breaks the program? Run it after every pass and compare with the program as imported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.errors import InputError
from tvmx.schedule.vectorizer import guarded_target, llvm_options
from tvmx.target import Target

Arrays = list[np.ndarray]
Run = Callable[[Any, Sequence[np.ndarray]], Arrays]
"""(Relax module, inputs in the order of main's parameters) → outputs, flat."""

RELATIVE_TO_RANGE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}
"""Allowed max abs error as a fraction of the reference's largest magnitude; every other dtype must agree exactly."""


@dataclass(frozen=True)
class PassCheck:
    """The program after one pass, against the program as imported.

    `max_abs` is the largest absolute error over all outputs, `max_rel` the largest ratio of an output's error to its
    range. A pass that changed nothing is not run again and repeats the figures of the one before. `error` is what
    the pass, the compiler or the program raised.
    """

    phase: str
    name: str
    changed: bool
    max_abs: float
    max_rel: float
    ok: bool
    seconds: float
    error: str | None = None

    def __str__(self) -> str:
        verdict = "ok  " if self.ok else "FAIL"
        figures = self.error or f"max abs error {self.max_abs:.3g}, of the range {self.max_rel:.3g}"
        note = "" if self.changed else " (unchanged)"
        return f"{verdict} {self.phase:12} {self.name:28} {figures}{note}"


def verify_per_pass(
    model: Any, target: Target, inputs: Mapping[str, np.ndarray], run: Run | None = None
) -> list[PassCheck]:
    """Run `model` (a frontend Model) after each pass of the pipeline on `inputs`, by name.

    Stops after the first failing pass: what follows works on a broken program. `run` defaults to TVM's own lowering,
    no schedules, on the Relax VM. Raises InputError if an input is missing.
    """
    import tvm
    import tvm_ffi

    from tvmx.pipeline import all_passes

    names = [t.name for t in model.inputs]
    missing = [n for n in names if n not in inputs]
    if missing:
        raise InputError(f"no array for input {missing[0]!r}; the model takes {', '.join(names)}")
    arrays = [np.ascontiguousarray(inputs[n]) for n in names]
    execute = run or (lambda mod, args: run_in_vm(mod, args, target))
    mod, checks = model.mod, []
    reference = execute(mod, arrays)
    error = Difference(0.0, 0.0, True)
    for phase, step in all_passes(target):
        began = time.perf_counter()
        changed, raised = True, None
        try:
            with target.tvm(), tvm.transform.PassContext(opt_level=3):
                after = step(mod)
            changed = not tvm_ffi.structural_equal(mod, after, map_free_vars=True)
            if changed:
                error = compare(execute(after, arrays), reference)
            mod = after
        except Exception as problem:  # whatever a pass raises is the finding
            raised = f"{type(problem).__name__}: {str(problem).strip().splitlines()[-1][:300]}"
        ok = raised is None and error.ok
        seconds = time.perf_counter() - began
        checks.append(PassCheck(phase, step.info.name, changed, error.absolute, error.of_range, ok, seconds, raised))
        if not ok:
            break
    return checks


@dataclass(frozen=True)
class Difference:
    """The worst over all outputs: absolute error, error as a fraction of the output's range, within tolerance?"""

    absolute: float
    of_range: float
    ok: bool


def compare(found: Arrays, reference: Arrays) -> Difference:
    """Outputs against the reference. A NaN or infinity must stand where the reference has one."""
    if len(found) != len(reference):
        return Difference(math.inf, math.inf, False)
    worst = Difference(0.0, 0.0, True)
    for a, b in zip(found, reference):
        one = _difference(a, b)
        worst = Difference(max(worst.absolute, one.absolute), max(worst.of_range, one.of_range), worst.ok and one.ok)
    return worst


def _difference(a: np.ndarray, b: np.ndarray) -> Difference:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(math.inf, math.inf, False)
    tolerance = RELATIVE_TO_RANGE.get(str(b.dtype))
    if tolerance is None:
        wrong = float(np.abs(a.astype("float64") - b.astype("float64")).max(initial=0.0))
        return Difference(wrong, wrong, bool((a == b).all()))
    x, y = a.astype("float64"), b.astype("float64")
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(x[finite]).all():
        return Difference(math.inf, math.inf, False)
    absolute = float(np.abs(x[finite] - y[finite]).max(initial=0.0))
    span = float(np.abs(y[finite]).max(initial=0.0))
    of_range = absolute / span if span > 0 else absolute
    return Difference(absolute, of_range, of_range <= tolerance)


def run_in_vm(mod: Any, arrays: Sequence[np.ndarray], target: Target) -> Arrays:
    """Compile with TVM's own lowering and no schedules, and run `main` on the Relax VM."""
    import tvm
    from tvm import relax

    from tvmx.passes.legalize import legalizers

    with target.tvm(), tvm.transform.PassContext(opt_level=3):
        mod = relax.transform.LegalizeOps(legalizers(target))(mod)  # ours know the NHWC forms that TVM's do not
    # Whatever the kernels are at this stage: right before fast. The first call generates code, too.
    with llvm_options(guarded=True):
        with target.tvm(), tvm.transform.PassContext(opt_level=3):
            executable = tvm.compile(mod, guarded_target(target.tvm()))
        machine = relax.VirtualMachine(executable, tvm.cpu())
        result = machine["main"](*(tvm.runtime.tensor(a) for a in arrays))
    return [t.numpy() for t in ([result] if hasattr(result, "numpy") else result)]
