"""Bars of the executor and runtime: start, memory, profiling overhead, side-by-side executors, pipeline gain.

python -m benchmarks.executor [--models orient,minilm-l3] [--large] [--out executor.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.measure import interleave, machine, ratio
from benchmarks.models import ModelUnavailable, ZooModel, zoo, zoo_model
from tvmx.report.files import write_text
from tvmx.runtime import GraphExecutor, Pipeline

_START = """
import json, sys, time
import numpy as np
inputs = dict(np.load(sys.argv[2]))
began = time.perf_counter()
from tvmx.runtime import GraphExecutor
executor = GraphExecutor(sys.argv[1], threads=2)
executor(inputs)
seconds = time.perf_counter() - began
with open("/proc/self/status") as file:  # ru_maxrss would count the parent before exec
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
parameters = executor.manifest.parameter_bytes
print(json.dumps({"start_s": seconds, "peak_rss": peak, "parameters": parameters, "arena": executor.arena_bytes}))
"""


def start(path: Path, inputs: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Load and first run in a fresh process, numpy imported before: best of three, and the peak RSS beyond
    parameters and arena."""
    np.savez(folder / "inputs.npz", **inputs)  # type: ignore[arg-type]
    command = [sys.executable, "-c", _START, str(path), str(folder / "inputs.npz")]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    best = min(runs, key=lambda r: r["start_s"])
    beyond = min(r["peak_rss"] for r in runs) - best["parameters"] - best["arena"]
    return {"start_s": round(best["start_s"], 3), "rss_beyond_mb": round(beyond / 1e6, 1)}


def profile_overhead(executor: GraphExecutor) -> float:
    """Run time with the time stamps on against without, rounds of about a millisecond interleaved.

    Minima over many short rounds: the one thing that other processes on the machine cannot make smaller.
    """
    program = executor._graph_program("profile")
    runs = max(1, int(1e-3 / executor.benchmark(repeat=20).min_s))
    stamps = np.zeros((runs, len(program.entry.nodes) + 1), np.int64)

    def plain() -> None:
        for _ in range(runs):
            program.run()

    samples = interleave({"run": plain, "profiled": lambda: program.stamped(stamps)}, 400, min_sample_s=0.0)
    return min(samples["profiled"]) / min(samples["run"])


def side_by_side(path: Path, inputs: dict[str, np.ndarray], runs: int) -> float:
    """Two one-thread executors in two threads: time for `runs` runs each against one executor alone."""

    def go(executor: GraphExecutor, gate: threading.Barrier, out: list[float]) -> None:
        for name, array in inputs.items():
            executor.set_input(name, array)
        executor.run()
        gate.wait()
        began = time.perf_counter()
        for _ in range(runs):
            executor.run()
        out.append(time.perf_counter() - began)

    def together(count: int) -> float:
        gate, out = threading.Barrier(count), list[float]()
        executors = [GraphExecutor(path, threads=1) for _ in range(count)]
        threads = [threading.Thread(target=go, args=(e, gate, out)) for e in executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for executor in executors:
            executor.close()
        return max(out)

    return statistics.median(together(2) / together(1) for _ in range(7))


def pipeline_gain(path: Path, items: int = 60) -> dict[str, float]:
    """Pages of the orientation model, decoded, resized and normalised: a plain loop against `Pipeline`."""
    from PIL import Image

    from benchmarks.models import _IMAGENET, _chw, _skimage

    photograph = Image.fromarray(np.ascontiguousarray(_skimage("page")))

    def prepare(angle: int) -> dict[str, np.ndarray]:
        turned = photograph.rotate(angle, expand=True).resize((256, 256), Image.Resampling.LANCZOS)
        return {"x": _chw(np.asarray(turned)[16:240, 16:240], *_IMAGENET)}

    def finish(angle: int, outputs: dict[str, np.ndarray]) -> int:
        return int(next(iter(outputs.values())).argmax())

    angles = [a % 360 for a in range(0, items * 7, 7)]
    with GraphExecutor(path, threads=1) as executor, Pipeline(executor, prepare, finish) as pipeline:
        plain = lambda: [finish(a, executor(prepare(a))) for a in angles]  # noqa: E731
        overlapped = lambda: list(pipeline(angles))  # noqa: E731
        assert plain() == overlapped()
        samples = interleave({"plain": plain, "pipeline": overlapped}, repeat=7, warmup=1)
        share = interleave({"prepare": lambda: prepare(30), "run": executor.run}, repeat=9)
    return {
        "prepare_ms": round(statistics.median(share["prepare"]) * 1e3, 3),
        "run_ms": round(statistics.median(share["run"]) * 1e3, 3),
        "items_per_s_plain": round(items / statistics.median(samples["plain"]), 1),
        "items_per_s_pipeline": round(items / statistics.median(samples["pipeline"]), 1),
        "gain": round(1 / ratio(samples, "pipeline", "plain"), 3),
    }


def large_parameters(folder: Path, tables: int = 3, gigabytes: float = 0.75) -> dict[str, Any]:
    """A model whose parameters exceed 2 GB in all: built, loaded and checked against numpy."""
    from onnx import TensorProto, helper

    width = 4096
    rows = int(gigabytes * 1e9 / 4 / width)
    rng = np.random.default_rng(0)
    arrays = [rng.random((rows, width), np.float32) for _ in range(tables)]
    tensors, nodes = [], []
    for i, array in enumerate(arrays):
        array.tofile(folder / f"table{i}.bin")
        tensor = TensorProto(name=f"table{i}", data_type=TensorProto.FLOAT, dims=[rows, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in {"location": f"table{i}.bin", "offset": "0", "length": str(array.nbytes)}.items():
            tensor.external_data.add(key=key, value=text)
        tensors.append(tensor)
        nodes.append(helper.make_node("Gather", [f"table{i}", "at"], [f"rows{i}"], name=f"gather{i}"))
    nodes.append(helper.make_node("Sum", [f"rows{i}" for i in range(tables)], ["y"], name="sum"))
    value = helper.make_tensor_value_info
    inputs, outputs = [value("at", TensorProto.INT64, [4])], [value("y", TensorProto.FLOAT, [4, width])]
    graph = helper.make_graph(nodes, "large", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "large.onnx").write_bytes(model.SerializeToString())
    began = time.perf_counter()
    tvmx.compile(str(folder / "large.onnx"), folder / "large.so")
    built = time.perf_counter() - began
    at = np.array([0, 1, rows // 2, rows - 1])
    began = time.perf_counter()
    with GraphExecutor(folder / "large.so") as executor:
        right = bool(np.allclose(executor({"at": at})["y"], sum(a[at] for a in arrays)))
    loaded = time.perf_counter() - began
    size = (folder / "large.so").stat().st_size
    return {"bytes": size, "build_s": round(built, 1), "load_and_run_s": round(loaded, 2), "right": right}


def measure(model: ZooModel, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    path = folder / f"{model.name}.so"
    tvmx.compile(str(model.path), path, shapes=model.shapes, constants=model.constants or None)
    inputs = model.random_inputs(np.random.default_rng(0))
    row = {"model": model.name, **start(path, inputs, folder)}
    with GraphExecutor(path, threads=1) as executor:
        for name, array in inputs.items():
            executor.set_input(name, array)
        executor.run()
        row["profile_overhead"] = round(profile_overhead(executor) - 1, 4)
        seconds = executor.benchmark(repeat=10).median_s
    row["two_executors"] = round(side_by_side(path, inputs, max(10, int(0.3 / seconds))), 3)
    if model.name == "orient":
        row["pipeline"] = pipeline_gain(path)
    return row


def main() -> int:
    """Measure, print a line a model, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo); '' for none")
    parser.add_argument("--large", action="store_true", help="also a model with 2.25 GB of parameters (needs 12 GB)")
    parser.add_argument("--out", type=Path, default=Path("build/executor.json"))
    arguments = parser.parse_args()
    models = [zoo_model(n) for n in arguments.models.split(",") if n] if arguments.models is not None else zoo()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            try:
                rows.append(measure(model, Path(folder)))
            except ModelUnavailable as reason:
                rows.append({"model": model.name, "skipped": str(reason)})
            print(json.dumps(rows[-1]), flush=True)
        if arguments.large:
            rows.append({"model": "2.25 GB of parameters", **large_parameters(Path(folder))})
            print(json.dumps(rows[-1]), flush=True)
    facts = machine()
    print(json.dumps(facts))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out, json.dumps({"machine": facts, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
