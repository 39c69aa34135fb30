"""Run one Relax expression through the phases, our default schedules and the VM; compare with numpy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvmx.executor.vm_build import _compile as compile_vm
from tvmx.pipeline import run_phases
from tvmx.schedule import apply_default
from tvmx.target import Target, resolve

RUNNABLE = ("x86_64-sse", "x86_64-avx2", "native")


def lowered(
    function: Callable[..., Any], shapes: Sequence[Sequence[Any]], dtypes: Sequence[str], target: Target
) -> tuple[Any, dict[str, str]]:
    """(module with scheduled kernels, kernel name → schedule rule). A dim given as a string is symbolic."""
    from tvm import relax, tirx

    dims: dict[str, Any] = {}
    variables = [
        relax.Var(
            f"x{i}",
            relax.TensorType(
                [dims.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d for d in shape], dtype
            ),
        )
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(function(*variables)))
        builder.emit_func_output(out)
    mod = run_phases(builder.get(), target)
    rules = {}
    for gv, func in list(mod.functions_items()):
        if isinstance(func, tirx.PrimFunc):
            scheduled = apply_default(func, target)
            rules[gv.name_hint] = scheduled.rule
            mod[gv] = scheduled.func
    return mod, rules


def run(
    function: Callable[..., Any], inputs: Sequence[np.ndarray], target: Target, shapes: Sequence[Any] | None = None
) -> tuple[Any, dict[str, str]]:
    """(output arrays, kernel name → rule); `shapes` overrides the inputs' shapes with symbolic ones."""
    import tvm
    from tvm import relax

    mod, rules = lowered(function, shapes or [x.shape for x in inputs], [str(x.dtype) for x in inputs], target)
    vm = relax.VirtualMachine(compile_vm(mod, target), tvm.cpu())
    out = vm["main"](*[tvm.runtime.tensor(x) for x in inputs])
    return (out.numpy() if hasattr(out, "numpy") else [o.numpy() for o in out]), rules


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[np.ndarray],
    target: str = "native",
    threads: int = 2,
    tolerance: float = 2e-5,
    shapes: Sequence[Any] | None = None,
) -> dict[str, str]:
    """Compare with `reference` in float64, relative to its largest magnitude; returns the rules that were used."""
    out, rules = run(function, inputs, resolve(target, threads), shapes)
    wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    want = np.asarray(reference(*wide))
    assert out.shape == want.shape
    scale = max(1.0, float(np.abs(np.nan_to_num(want.astype(np.float64), posinf=0, neginf=0)).max(initial=0)))
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance * scale)
    assert "unscheduled" not in rules.values()
    return rules


def no_refusals(caplog: Any) -> bool:
    """Did no schedule rule refuse a kernel?"""
    return not [r for r in caplog.records if r.levelno >= logging.WARNING and "refused" in r.getMessage()]
