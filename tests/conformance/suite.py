"""ONNX's own backend node tests: which there are, which inputs are parameters, how to run one."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Inputs that are parameters of the operator rather than data, by position. They are bound with
# `constants=`, as a user of tvmx would who has such a model.
PARAMETERS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "CumProd": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "STFT": (1, 3),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
_REDUCE = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
PARAMETERS |= {f"Reduce{kind}": (1,) for kind in _REDUCE}

# What the project does not aim at: they count neither as passed nor as failed.
OUT_OF_SCOPE = {
    "ai.onnx.preview.training": "training",
    "ai.onnx.ml": "classic machine learning",
}
STRING = 8

# Relative tolerances of the narrow float types; that of bfloat16 is what ONNX's own runner grants.
NARROW = {"bfloat16": 2**-6, "float16": 2**-9}


@dataclass(frozen=True)
class Case:
    name: str
    op: str  # the operator under test
    model: Any  # onnx.ModelProto
    data: list[tuple[list[Any], list[Any]]]  # (inputs, outputs) per set
    rtol: float
    atol: float
    parameters: tuple[str, ...]  # inputs to bind
    scope: str  # "" when it counts, else why it does not


@dataclass(frozen=True)
class Outcome:
    name: str
    op: str
    status: str  # pass | unsupported | wrong | crash | out of scope
    detail: str = ""


def cases() -> Iterator[Case]:
    """All node tests of the installed onnx, in a fixed order."""
    from onnx.backend.test.case.node import collect_testcases

    found = collect_testcases(None)
    by_name = {c.name: c for c in found}
    for case in sorted(found, key=lambda c: c.name):
        base = by_name.get(re.sub(r"_expanded.*$", "", case.name), case)
        op = base.model.graph.node[0].op_type
        names = base.model.graph.node[0].input
        inputs = {i.name for i in case.model.graph.input}
        bound = tuple(names[i] for i in PARAMETERS.get(op, ()) if i < len(names) and names[i] in inputs)
        yield Case(case.name, op, case.model, case.data_sets, case.rtol, case.atol, bound, _scope(case.model))


def _scope(model: Any) -> str:
    for node in model.graph.node:
        if node.domain in OUT_OF_SCOPE:
            return OUT_OF_SCOPE[node.domain]
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            return f"{str(kind).removesuffix('_type')} values"
        if value.type.tensor_type.elem_type == STRING:
            return "strings"
    return ""


def as_array(value: Any) -> np.ndarray:
    from onnx import numpy_helper

    return numpy_helper.to_array(value) if hasattr(value, "SerializeToString") else np.asarray(value)


def run_case(case: Case, via: str) -> Outcome:
    """Import, compile, run and compare one test."""
    from tvmx.errors import TvmxError

    if case.scope:
        return Outcome(case.name, case.op, "out of scope", case.scope)
    names = [i.name for i in case.model.graph.input]
    for inputs, outputs in case.data:
        feed = {n: as_array(v) for n, v in zip(names, inputs)}
        constants = {n: feed.pop(n) for n in case.parameters if n in feed}
        shapes = {n: v.shape for n, v in feed.items()}
        try:
            results = RUNNERS[via](case.model, shapes, constants, feed)
        except TvmxError as err:
            return Outcome(case.name, case.op, "unsupported", str(err))
        except Exception as err:  # anything else is ours to fix: a clear error is part of the deal
            where = traceback.extract_tb(err.__traceback__)[-1]
            text = (str(err).strip() or type(err).__name__).splitlines()[-1]
            detail = f"{type(err).__name__}: {text[:300]} ({Path(where.filename).name}:{where.lineno})"
            return Outcome(case.name, case.op, "wrong", detail)
        problem = compare([as_array(o) for o in outputs], results, case.rtol, case.atol)
        if problem:
            return Outcome(case.name, case.op, "wrong", problem)
    return Outcome(case.name, case.op, "pass")


def compare(want: list[np.ndarray], have: list[np.ndarray], rtol: float, atol: float) -> str | None:
    """The first difference in count, dtype, shape or value, or None."""
    if len(want) != len(have):
        return f"{len(have)} outputs, {len(want)} expected"
    for i, (w, h) in enumerate(zip(want, have)):
        if w.dtype != h.dtype:
            return f"output {i} is {h.dtype}, {w.dtype} expected"
        if w.shape != h.shape:
            return f"output {i} has shape {h.shape}, {w.shape} expected"
        if w.dtype.kind in "iub":
            bad = int((w != h).sum())
            if bad:
                return f"output {i}: {bad} of {w.size} values differ: {_sample(w, h, w != h)}"
            continue
        allowed = max(rtol, NARROW.get(w.dtype.name, 0.0))
        a, b = (w, h) if w.dtype.kind == "c" else (w.astype(np.float64), h.astype(np.float64))
        close = np.isclose(b, a, rtol=allowed, atol=max(atol, 1e-5), equal_nan=True)
        if not close.all():
            return f"output {i}: {int((~close).sum())} of {w.size} values differ: {_sample(a, b, ~close)}"
    return None


def _sample(want: np.ndarray, have: np.ndarray, bad: np.ndarray) -> str:
    at = tuple(int(v) for v in np.argwhere(bad)[0]) if bad.ndim else ()
    return f"at {at} {have[at]} instead of {want[at]}"


def _run_vm(model: Any, shapes: Any, constants: Any, feed: dict[str, np.ndarray]) -> list[Any]:
    import tvm
    from tvm import relax

    from tvmx.frontend import import_onnx

    imported = import_onnx(model, shapes, constants)
    vm = relax.VirtualMachine(tvm.compile(imported.mod, "llvm"), tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(feed[t.name]) for t in imported.inputs])
    return [r.numpy() for r in result]


def _run_so(model: Any, shapes: Any, constants: Any, feed: dict[str, np.ndarray]) -> list[Any]:
    import tvmx
    from tvmx.runtime import GraphExecutor

    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "m.so"
        tvmx.compile(model, path, threads=1, shapes=shapes, constants=constants)
        with GraphExecutor(path, threads=1) as executor:
            return list(executor({t.name: feed[t.name] for t in executor.inputs}).values())


RUNNERS = {"vm": _run_vm, "so": _run_so}
