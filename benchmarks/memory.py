"""Memory plans: hard public instances, generated large ones, and the zoo beside TVM's own planner.

python -m benchmarks.memory [--instances DIR] [--sizes 2000,20000,60000] [--models orient,yolox] [--out memory.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.measure import machine
from benchmarks.memory_problems import GENERATORS
from benchmarks.models import ModelUnavailable, ZooModel, zoo, zoo_model
from benchmarks.ort_arena import ort_arena
from tvmx.executor.lifetimes import arena_buffers
from tvmx.memory import Buffer, PlanCache, Problem, plan
from tvmx.report.files import write_text
from tvmx.runtime import GraphExecutor
from tvmx.runtime.arena import to_problem

CAPACITY = 1 << 20  # of MiniMalloc's hard instances


def instance(path: Path) -> dict[str, Any]:
    """One CSV problem: does it fit its capacity, and how soon?"""
    problem = Problem.from_csv(path)
    began = time.perf_counter()
    found = plan(problem, budget_s=60.0, capacity=CAPACITY)
    seconds = time.perf_counter() - began
    return {"problem": path.name, "buffers": len(problem.buffers), "height": found.height, "seconds": round(seconds, 2),
            "solved": found.height <= max(CAPACITY, found.lower_bound)}  # fmt: skip


def generated(name: str, make: Any, count: int) -> dict[str, Any]:
    """A generated problem of `count` buffers within the default budget; every plan is validated."""
    problem = make(count, 0)
    began = time.perf_counter()
    found = plan(problem)
    seconds = time.perf_counter() - began
    return {"problem": name, "buffers": count, "over_bound": round(found.height / found.lower_bound, 4),
            "seconds": round(seconds, 1)}  # fmt: skip


def run_time_plan(tensors: int = 500, shapes: int = 10) -> dict[str, Any]:
    """Median milliseconds in which a model of symbolic shape is planned at the first use of a shape."""

    def model(dims: Mapping[str, int]) -> Problem:
        rng = random.Random(1)
        lives = [(i, i + 1 + rng.choice([1, 1, 2, 3, 20])) for i in range(tensors)]
        return Problem(Buffer(f"t{i}", life, 64 * dims["N"] * rng.randrange(1, 999)) for i, life in enumerate(lives))

    cache, samples = PlanCache(model, limit=3), []
    for n in range(1, 20 * shapes, 20):
        began = time.perf_counter()
        cache.plan({"N": n})
        samples.append(time.perf_counter() - began)
    return {"tensors": tensors, "plan_ms": round(statistics.median(samples) * 1e3, 2)}


def zoo_arena(model: ZooModel, folder: Path) -> dict[str, Any]:
    """Arena of a compiled model against its bound, against no sharing and against StaticPlanBlockMemory."""
    imported = tvmx.import_onnx(str(model.path), shapes=model.shapes, constants=model.constants or None)
    result = tvmx.compile(imported, folder / f"{model.name}.so", threads=1)
    inputs = model.random_inputs(np.random.default_rng(0))
    with GraphExecutor(result.path, threads=1) as executor:
        arena, bound = executor.arena_bytes, executor.arena_lower_bound
        executor(inputs)
        assert executor._library is not None
        scratch = int(executor._library.pool_scratch(executor._pool))
        unshared = executor.manifest.entries["main"].arena.unshared_bytes or 0
    return {"model": model.name, "arena": arena, "lower_bound": bound, "ratio": round(arena / max(bound, 1), 4),
            "model_order": in_model_order(result.graph), "unshared": unshared,
            "saved": round(1 - arena / max(unshared, 1), 3), "tvm": tvm_arena(imported), "scratch": scratch,
            "onnxruntime": ort_arena(model.path, {**inputs, **(model.constants or {})})}  # fmt: skip


def in_model_order(graph: Any) -> int:
    """Bytes of the arena if nodes ran in the order of the model."""
    return plan(to_problem(arena_buffers(graph), int)).height


def tvm_arena(model: Any) -> int:
    """Bytes of the storages that TVM's StaticPlanBlockMemory allocates for the same lowered program.

    Outputs are left out, as they are in our arena.
    """
    import tvm_ffi
    from tvm import relax, tirx
    from tvm.ir import Call

    from tvmx.api import lower
    from tvmx.target import resolve

    t = relax.transform
    mod = lower(model, resolve("native", 1)).mod
    for step in (t.ToNonDataflow(), t.RemovePurityChecking(), t.CallTIRRewrite(), t.StaticPlanBlockMemory()):
        mod = step(mod)
    total = 0

    def visit(call: Any) -> None:
        nonlocal total
        if getattr(call.op, "name", "") == "relax.memory.alloc_storage":
            total += int(call.args[0].values[0])

    for _, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func, [(Call, visit)])
    return total


def main() -> int:
    """Measure, print a line each, write the JSON. Exit status 1 when an instance does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, default=Path("tests/data/minimalloc"))
    parser.add_argument("--sizes", default="2000,20000,60000")
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo)")
    parser.add_argument("--out", type=Path, default=Path("build/memory.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    for path in sorted(arguments.instances.glob("*.1048576.csv")):
        add(instance(path))
    add(run_time_plan())
    for name, make in GENERATORS.items():
        for count in (int(s) for s in arguments.sizes.split(",") if s):
            add(generated(name, make, count))
    models = [zoo_model(n) for n in arguments.models.split(",") if n] if arguments.models is not None else zoo()
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            try:
                add(zoo_arena(model, Path(folder)))
            except ModelUnavailable as reason:
                add({"model": model.name, "skipped": str(reason)})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out, json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return 1 if any(row.get("solved") is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
