"""Latency of the zoo against ONNX Runtime and OpenVINO, interleaved in one run; JSON with raw samples.

python -m benchmarks.latency [--models orient,minilm-l3] [--threads 1,2] [--tuned | --log DIR] [--out latency.json]

`--tuned` also measures builds with the logs that ship with tvmx, `--log` with those and the log given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.measure import interleave, machine, ratio
from benchmarks.models import ModelUnavailable, ZooModel, zoo
from benchmarks.peers import onnxruntime_run, onnxruntime_session, openvino_run
from tvmx.config import CompileConfig
from tvmx.report.files import write_text
from tvmx.runtime import GraphExecutor


def relative_error(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Largest absolute error of any output as a share of that output's range."""
    worst = 0.0
    for name, want in expected.items():
        got = outputs[name].astype(np.float64)
        span = float(np.ptp(want)) or float(np.abs(want).max()) or 1.0
        worst = max(worst, float(np.abs(got - want).max()) / span)
    return worst


def fixed_model(model: ZooModel) -> bytes:
    """The model with `constants` bound, so that every contender runs the same program."""
    import onnx

    proto = onnx.load(model.path)
    for name, value in model.constants.items():
        kept = [i for i in proto.graph.input if i.name != name]
        del proto.graph.input[:]
        proto.graph.input.extend(kept)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return bytes(proto.SerializeToString())


def measure(model: ZooModel, threads: int, tuned: bool, log: str | None, repeat: int, folder: Path) -> dict[str, Any]:
    """Compile untuned (and `tuned`, from `log` and the shipped logs), check the outputs, time all in turn."""
    inputs = model.random_inputs(np.random.default_rng(0))
    proto = fixed_model(model)
    session = onnxruntime_session(proto, threads)
    names = [o.name for o in session.get_outputs()]
    expected = dict(zip(names, session.run(None, inputs), strict=True))

    row: dict[str, Any] = {"model": model.name, "threads": threads}
    contenders: dict[str, Any] = {}
    executors = []
    for label, use_log in (("untuned", None), ("tuned", log)):
        if label == "tuned" and not tuned:
            continue
        path = folder / f"{model.name}-{label}-{threads}.so"
        start = time.perf_counter()
        result = tvmx.compile(
            str(model.path),
            path,
            threads=threads,
            log=use_log,
            shapes=model.shapes,
            constants=model.constants or None,
            config=CompileConfig(use_shipped_logs=label == "tuned"),
        )
        row[f"compile_{label}_s"] = round(time.perf_counter() - start, 2)
        executor = GraphExecutor(path, threads=threads)
        executors.append(executor)
        row[f"error_{label}"] = relative_error(executor(inputs), expected)
        row["arena_bytes"], row["arena_lower_bound"] = executor.arena_bytes, executor.arena_lower_bound
        row[f"vm_{label}"] = result.report.get("vm_reason")
        for name, array in inputs.items():
            executor.set_input(name, array)
        contenders[label] = executor.run
    contenders["onnxruntime"] = onnxruntime_run(proto, inputs, threads)
    openvino = openvino_run(proto, inputs, threads)
    if openvino is not None:
        contenders["openvino"] = openvino

    samples = interleave(contenders, repeat=repeat)
    for executor in executors:
        executor.close()
    row["samples_s"] = samples
    row["median_ms"] = {name: round(statistics.median(s) * 1e3, 4) for name, s in samples.items()}
    row["ratios"] = {
        ours: {peer: round(ratio(samples, ours, peer), 3) for peer in ("onnxruntime", "openvino") if peer in samples}
        for ours in ("untuned", "tuned")
        if ours in samples
    }
    if "tuned" in samples:
        row["tuned_over_untuned"] = round(ratio(samples, "tuned", "untuned"), 3)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """One line a model and thread count, then the geometric means of the ratios."""
    lines = [
        f"{'model':14}{'thr':>4}{'untuned':>10}{'tuned':>10}{'ORT':>10}{'OpenVINO':>10}"
        f"{'un/ORT':>8}{'un/best':>8}{'tu/best':>8}{'tu/un':>8}{'error':>9}{'compile':>9}"
    ]
    means: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['model']:14}{row['threads']:4}  FAILED: {row['failed']}")
            continue
        ms = row["median_ms"]
        cells = [f"{ms[k]:10.3f}" if k in ms else f"{'-':>10}" for k in ("untuned", "tuned", "onnxruntime", "openvino")]
        ratios = row["ratios"]
        against = {
            "un/ORT": ratios["untuned"]["onnxruntime"],
            "un/best": max(ratios["untuned"].values()),
            "tu/best": max(ratios["tuned"].values()) if "tuned" in ratios else None,
            "tu/un": row.get("tuned_over_untuned"),
        }
        for key, value in against.items():
            if value is not None:
                means.setdefault((row["threads"], key), []).append(value)
        shown = "".join(f"{v:8.2f}" if v is not None else f"{'-':>8}" for v in against.values())
        lines.append(
            f"{row['model']:14}{row['threads']:4}{''.join(cells)}{shown}"
            f"{row['error_untuned']:9.1e}{row['compile_untuned_s']:8.1f}s"
        )
    for (threads, key), values in sorted(means.items()):
        lines.append(f"geometric mean, {threads} thread(s), {key}: {statistics.geometric_mean(values):.3f}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the JSON. Exit status 1 when a model failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tuned", action="store_true", help="measure builds with the shipped logs too")
    parser.add_argument("--log", help="tuning log folder to use besides; implies --tuned")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("latency.json"))
    arguments = parser.parse_args()
    wanted = arguments.models.split(",") if arguments.models else [m.name for m in zoo()]
    rows: list[dict[str, Any]] = []
    tuned = arguments.tuned or arguments.log is not None
    with tempfile.TemporaryDirectory() as folder:
        for model in [m for m in zoo() if m.name in wanted]:
            for threads in map(int, arguments.threads.split(",")):
                try:
                    rows.append(measure(model, threads, tuned, arguments.log, arguments.repeat, Path(folder)))
                except (tvmx.TvmxError, ModelUnavailable) as error:
                    rows.append({"model": model.name, "threads": threads, "failed": f"{type(error).__name__}: {error}"})
                print(table(rows[-1:]).splitlines()[1], flush=True)
    facts = machine()
    print(json.dumps(facts))
    print(table(rows))
    write_text(arguments.out, json.dumps({"machine": facts, "rows": rows}, indent=1))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
