"""INT8 latency: what `tvmx quantize` makes and ours on ONNX Runtime's QDQ file, against our FP32, ONNX Runtime's INT8
(the same file) and FP32, and OpenVINO's INT8 (the same file).

ONNX Runtime quantises the zoo by `quantize_static` (uint8 activations, int8 weights per channel). Everything is
interleaved in one process at one thread count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import interleave, machine, ratio
from benchmarks.models import ZooModel, cache_dir, zoo
from benchmarks.peers import onnxruntime_run, onnxruntime_session, openvino_run


def quantized(model: ZooModel, samples: int = 4) -> Path:
    """The zoo model as ONNX Runtime quantises it (QDQ), made once and kept beside the float one."""
    path = cache_dir() / f"{model.name}-ort-qdq.onnx"
    if path.exists():
        return path
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    rng = np.random.default_rng(0)
    real = [inputs for _, inputs in model.real_inputs()] if model.real_inputs else []
    feeds = [{**f, **model.constants} for f in (*real[:samples], *(model.random_inputs(rng) for _ in range(2)))]
    fixed = [f for f in feeds if all(f[k].shape == tuple(s) for k, s in model.shapes.items())]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(fixed)

        def get_next(self) -> Any:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder:
        prepared = str(Path(folder) / "prepared.onnx")
        onnx.save(_at_opset_13(onnx.load(model.path)), prepared)
        quant_pre_process(prepared, prepared, skip_symbolic_shape=True)
        part = path.with_suffix(".part")
        options = {
            "quant_format": QuantFormat.QDQ,
            "activation_type": QuantType.QUInt8,
            "weight_type": QuantType.QInt8,
        }
        try:
            quantize_static(prepared, str(part), Reader(), per_channel=True, **options)
        except ValueError:  # ONNX Runtime's own per-channel path fails on some models
            quantize_static(prepared, str(part), Reader(), per_channel=False, **options)
        part.replace(path)
    return path


def _at_opset_13(model: Any) -> Any:
    """Scales per channel need opset 13."""
    from onnx import version_converter

    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    return version_converter.convert_version(model, 13) if opset < 13 else model


def calibration_feeds(model: ZooModel) -> list[Any]:
    """Up to eight inputs at the measured shapes, real ones first."""
    rng = np.random.default_rng(0)
    real = [inputs for _, inputs in model.real_inputs()] if model.real_inputs else []
    feeds = [*real[:4], *(model.random_inputs(rng) for _ in range(4))]
    return [f for f in feeds if all(f[k].shape == tuple(s) for k, s in model.shapes.items())]


def ours(model: ZooModel, threads: int) -> Any:
    """The model as `tvmx quantize` makes it with default settings from the same calibration inputs."""
    import tvmx

    constants = model.constants or None
    feeds = calibration_feeds(model)
    return tvmx.quantize(str(model.path), feeds, shapes=model.shapes, constants=constants, threads=threads)


def measure(model: ZooModel, threads: int, folder: Path, repeat: int) -> dict[str, Any]:
    """One row: milliseconds of every contender, and how far each INT8 output is from the float one."""
    import tvmx
    from tvmx.config import CompileConfig
    from tvmx.runtime import GraphExecutor

    qdq = quantized(model)
    inputs = model.random_inputs(np.random.default_rng(1))
    feed = {**inputs, **model.constants}
    row: dict[str, Any] = {"model": model.name, "threads": threads}
    contenders: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    executors = []
    mine = ours(model, threads)
    row["kept in float"] = [list(k) for k in mine.report.kept]
    for label, source in (("fp32", str(model.path)), ("int8", mine), ("int8 qdq", str(qdq))):
        path = folder / f"{model.name}-{label.replace(' ', '-')}-{threads}.so"
        result = tvmx.compile(
            source,
            path,
            threads=threads,
            shapes=model.shapes,
            constants=(model.constants or None) if label != "int8" else None,
            config=CompileConfig(use_shipped_logs=False),
        )
        row[f"rules_{label}"] = result.report.get("rules")
        row[f"parameter_bytes_{label}"] = result.report.get("parameter_bytes")
        executor = GraphExecutor(path, threads=threads)
        executors.append(executor)
        known = {t.name for t in executor.inputs}
        given = {name: array for name, array in inputs.items() if name in known}
        outputs[label] = {name: np.array(value) for name, value in executor(given).items()}
        for name, array in given.items():
            executor.set_input(name, array)
        contenders[label] = executor.run
    for label, source in (("ort fp32", model.path), ("ort int8", qdq)):
        session = onnxruntime_session(str(source), threads)
        outputs[label] = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
        contenders[label] = onnxruntime_run(str(source), feed, threads)
    openvino = openvino_run(str(qdq), feed, threads)
    if openvino is not None:
        contenders["openvino int8"] = openvino
    row["sqnr_db"] = {k: round(sqnr(outputs[k], outputs["ort fp32"]), 1) for k in outputs if k != "ort fp32"}
    # CPU time leaves out what other processes took; threads of a pool spin, so it says nothing of several.
    clock = time.process_time if threads == 1 else time.perf_counter
    samples = interleave(contenders, repeat=repeat, clock=clock)
    for executor in executors:
        executor.close()
    row["samples_s"] = samples
    row["median_ms"] = {name: round(statistics.median(s) * 1e3, 4) for name, s in samples.items()}
    row["ratios"] = {
        f"{mine_} / {peer}": round(ratio(samples, mine_, peer), 3)
        for mine_ in ("int8", "int8 qdq")
        for peer in samples
        if peer != mine_
    }
    return row


def sqnr(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Signal to quantisation noise over all float outputs, dB."""
    signal = noise = 0.0
    for name, want in expected.items():
        if want.dtype.kind == "f":
            difference = found[name].astype(np.float64) - want
            signal += float((want.astype(np.float64) ** 2).sum())
            noise += float((difference**2).sum())
    return 10 * float(np.log10(max(signal, 1e-30) / max(noise, 1e-30)))


def table(rows: list[dict[str, Any]]) -> str:
    """One line a model and thread count, then the geometric means."""
    names = ("int8", "int8 qdq", "fp32", "ort int8", "ort fp32", "openvino int8")
    shown = ("int8 / fp32", "int8 qdq / fp32", "int8 / ort int8", "int8 qdq / ort int8")
    lines = [
        f"{'model':14}{'thr':>4}"
        + "".join(f"{n:>14}" for n in names)
        + "".join(f"{n:>21}" for n in shown)
        + "  SQNR dB"
    ]
    means: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['model']:14}{row['threads']:4}  FAILED: {row['failed']}")
            continue
        ms, ratios, db = row["median_ms"], row["ratios"], row["sqnr_db"]
        cells = "".join(f"{ms[n]:14.3f}" if n in ms else f"{'-':>14}" for n in names)
        for key in shown:
            means.setdefault((row["threads"], key), []).append(ratios[key])
        cells += "".join(f"{ratios[key]:21.2f}" for key in shown)
        noise = " ".join(f"{db[k]:.0f}" for k in ("int8", "int8 qdq", "ort int8"))
        lines.append(f"{row['model']:14}{row['threads']:4}{cells}  {noise}")
    for (threads, key), values in sorted(means.items()):
        mean = statistics.geometric_mean(values)
        lines.append(f"{threads} thread(s), {key}: geometric mean {mean:.3f}, worst {max(values):.3f}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the JSON. Exit status 1 when a model failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="comma-separated names (default: the whole zoo)")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("int8_speed.json"))
    arguments = parser.parse_args()
    chosen = arguments.models.split(",") if arguments.models else [m.name for m in zoo()]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in zoo():
            if model.name not in chosen:
                continue
            for threads in (int(t) for t in arguments.threads.split(",")):
                try:
                    rows.append(measure(model, threads, Path(folder), arguments.repeat))
                except Exception as error:
                    traceback.print_exc()
                    rows.append({"model": model.name, "threads": threads, "failed": str(error).splitlines()[-1][:100]})
                print(table(rows[-1:]), flush=True)
    print(table(rows))
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
