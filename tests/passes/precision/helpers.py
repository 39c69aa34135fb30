"""Programs from ONNX, passed through canonicalize and precision for a target with or without 16-bit arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

from tests.passes.conftest import evaluate
from tvmx.api import import_onnx
from tvmx.passes.precision import assign_precision, plan_of, with_rules
from tvmx.pipeline import canonicalize
from tvmx.precision import PrecisionPlan, PrecisionRules
from tvmx.target import PRESETS, Target, resolve

GPU = resolve("cuda-sm80")  # has 16-bit arithmetic; the programs here run on the CPU all the same
CPU = PRESETS["x86_64-avx512"]


def imported(proto: Any, shapes: Any = None) -> Any:
    """The canonical program of an ONNX model."""
    return tvm.transform.Sequential(canonicalize(CPU))(import_onnx(proto, shapes).mod)


def assigned(mod: Any, rules: PrecisionRules, target: Target = GPU) -> tuple[Any, PrecisionPlan]:
    """The program in the precisions of `rules`, and the plan."""
    mod = assign_precision(target)(with_rules(mod, rules))
    plan = plan_of(mod)
    assert plan is not None
    return mod, plan


def run(mod: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    return evaluate(mod, inputs)


def casts(mod: Any) -> list[str]:
    """operator or "→dtype", in program order."""
    from tvmx.passes.rewrite import dtype_of, op_name

    return [
        f"→{dtype_of(b.var)}" if op_name(b.value) == "astype" else op_name(b.value)
        for block in mod["main"].body.blocks
        for b in block.bindings
        if op_name(b.value)
    ]
