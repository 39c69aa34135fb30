"""Latency of the zoo against ONNX Runtime and OpenVINO, interleaved in one run; JSON with raw samples.

python -m benchmarks.latency [--models orient,minilm-l3] [--threads 1,2] [--tuned [LOG]] [--quick] [--out latency.json]

`--tuned` also measures builds with the logs that ship with tvmx, `--tuned LOG` with those and the log given. `--quick`
is one thread and few rounds. `--clock cpu` counts CPU time in place of wall time, for a machine that others use, one
thread only. The JSON is written after every model, so that a run cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.latency_report import bars, table
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


@dataclass(frozen=True)
class Options:
    """What to measure beside the untuned build, and how."""

    tuned: bool = False  # builds with the shipped logs ...
    log: str | None = None  # ... and this one
    repeat: int = 30
    clock: str = "wall"  # "wall" | "cpu"


def measure(model: ZooModel, threads: int, options: Options, folder: Path) -> dict[str, Any]:
    """Compile untuned (and tuned), check the outputs, time all contenders in turn."""
    inputs = model.random_inputs(np.random.default_rng(0))
    proto = fixed_model(model)
    session = onnxruntime_session(proto, threads)
    names = [o.name for o in session.get_outputs()]
    expected = dict(zip(names, session.run(None, inputs), strict=True))

    row: dict[str, Any] = {"model": model.name, "threads": threads}
    contenders: dict[str, Any] = {}
    executors = []
    for label, use_log in (("untuned", None), ("tuned", options.log)):
        if label == "tuned" and not options.tuned:
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
        row[f"error_real_{label}"] = real_error(model, executor, session)
        row["arena_bytes"], row["arena_lower_bound"] = executor.arena_bytes, executor.arena_lower_bound
        row[f"vm_{label}"] = result.report.get("vm_reason")
        for name, array in inputs.items():
            executor.set_input(name, array)
        contenders[label] = executor.run
    contenders["onnxruntime"] = onnxruntime_run(proto, inputs, threads)
    openvino = openvino_run(proto, inputs, threads)
    if openvino is not None:
        contenders["openvino"] = openvino

    samples = interleave(
        contenders,
        repeat=options.repeat,
        settle_s=0.01 if threads > 1 else 0.0,
        clock=time.process_time if options.clock == "cpu" else time.perf_counter,
    )
    for executor in executors:
        executor.close()
    row["samples_s"] = samples
    row["clock"] = options.clock
    row["best_ms"] = {name: round(min(s) * 1e3, 4) for name, s in samples.items()}
    row["median_ms"] = {name: round(statistics.median(s) * 1e3, 4) for name, s in samples.items()}
    row["ratios"] = {
        ours: {peer: round(ratio(samples, ours, peer), 3) for peer in ("onnxruntime", "openvino") if peer in samples}
        for ours in ("untuned", "tuned")
        if ours in samples
    }
    if "tuned" in samples:
        row["tuned_over_untuned"] = round(ratio(samples, "tuned", "untuned"), 3)
    return row


def real_error(model: ZooModel, executor: GraphExecutor, session: Any) -> float | None:
    """The largest relative error over the model's real inputs; None where there are none to be had."""
    if model.real_inputs is None:
        return None
    try:
        examples = model.real_inputs()
    except ModelUnavailable as reason:
        print(f"{model.name}: no real inputs ({reason})")
        return None
    names = [o.name for o in session.get_outputs()]
    return max(
        relative_error(executor(inputs), dict(zip(names, session.run(None, inputs), strict=True)))
        for _, inputs in examples
    )


def main() -> int:
    """Measure, print the table, write the JSON. Exit status 1 when a model failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo)")
    parser.add_argument("--threads", help="comma-separated counts (default 1,2; with --quick 1)")
    parser.add_argument("--tuned", nargs="?", const="", metavar="LOG", help="tuned builds too, with this log folder")
    parser.add_argument("--repeat", type=int, help="rounds (default 30; with --quick 8)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=Path("latency.json"))
    arguments = parser.parse_args()
    known = [m.name for m in zoo()]
    wanted = arguments.models.split(",") if arguments.models else known
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
    threads = [int(t) for t in (arguments.threads or ("1" if arguments.quick else "1,2")).split(",")]
    if arguments.clock == "cpu" and threads != [1]:
        parser.error("--clock cpu adds up the threads' time: use it with --threads 1")
    repeat = arguments.repeat or (8 if arguments.quick else 30)
    options = Options(arguments.tuned is not None, arguments.tuned or None, repeat, arguments.clock)
    facts = machine()
    print(json.dumps(facts))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in [m for m in zoo() if m.name in wanted]:
            for count in threads:
                try:
                    rows.append(measure(model, count, options, Path(folder)))
                except Exception as error:  # one model's failure must not lose the others' figures
                    rows.append({"model": model.name, "threads": count, "failed": f"{type(error).__name__}: {error}"})
                print("\n".join(table(rows[-1:], means=False)[1 if len(rows) > 1 else 0 :]), flush=True)
                write_text(arguments.out, json.dumps({"machine": facts, "rows": rows}, indent=1))
    print("\n".join(["", *table(rows), "", *bars(rows)]))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
