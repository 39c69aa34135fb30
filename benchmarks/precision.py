"""What a precision costs and saves on real models: latency against float32, parameter bytes, error; JSON with samples.

python -m benchmarks.precision [--models minilm-l3,orient] [--threads 1] [--repeat 30] [--out precision.json]

Every variant of a model runs in turn in one process; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.latency import fixed_model, relative_error
from benchmarks.measure import interleave, machine, ratio
from benchmarks.models import ModelUnavailable, ZooModel, zoo_model
from tvmx.config import CompileConfig
from tvmx.report.files import write_text
from tvmx.runtime import GraphExecutor

VARIANTS: dict[str, dict[str, str]] = {
    "fp32": {},
    "fp16": {"precision": "fp16"},
    "fp16 size": {"precision": "fp16", "prefer": "size"},
    "bf16": {"precision": "bf16"},
    "bf16 size": {"precision": "bf16", "prefer": "size"},
}


def measure(model: ZooModel, threads: int, repeat: int, folder: Path) -> list[dict[str, Any]]:
    """One row per variant: latency over float32's, parameter bytes over float32's, error as a share of the range."""
    inputs = model.random_inputs(np.random.default_rng(0))
    proto = fixed_model(model)
    shapes = {name: array.shape for name, array in inputs.items()}
    config = CompileConfig(use_shipped_logs=False)
    executors, outputs, rows = {}, {}, []
    for variant, options in VARIANTS.items():
        path = folder / f"{model.name}-{variant.replace(' ', '-')}.so"
        result = tvmx.compile(proto, path, threads=threads, shapes=shapes, config=config, **options)
        executor = GraphExecutor(path, threads=threads)
        outputs[variant] = {k: np.array(v) for k, v in executor(inputs).items()}
        for name, array in inputs.items():
            executor.set_input(name, array)
        executors[variant] = executor
        counts = result.precision.counts() if result.precision is not None else {"fp32": "all"}
        rows.append(
            {
                "model": model.name,
                "variant": variant,
                "operators": counts,
                "parameter_bytes": result.report["parameter_bytes"],
                "error": relative_error(outputs[variant], outputs["fp32"]),
            }
        )
    samples = interleave({name: executor.run for name, executor in executors.items()}, repeat=repeat)
    for row in rows:
        row["ms"] = min(samples[row["variant"]]) * 1e3
        row["latency_ratio"] = ratio(samples, row["variant"], "fp32")
        row["minimum_ratio"] = min(samples[row["variant"]]) / min(samples["fp32"])
        row["bytes_ratio"] = row["parameter_bytes"] / rows[0]["parameter_bytes"]
        row["samples_s"] = samples[row["variant"]]
    for executor in executors.values():
        executor.close()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="minilm-l3,orient")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {"machine": machine(), "threads": arguments.threads, "rows": []}
    print(json.dumps(report["machine"]))
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            try:
                rows = measure(zoo_model(name), arguments.threads, arguments.repeat, Path(folder))
            except ModelUnavailable as reason:
                print(f"{name}: skipped, {reason}", file=sys.stderr)
                continue
            report["rows"].extend(rows)
            for row in rows:
                print(
                    f"{row['model']:10} {row['variant']:10} {row['ms']:7.2f} ms  x{row['latency_ratio']:.2f} median "
                    f"x{row['minimum_ratio']:.2f} of minima  {row['parameter_bytes'] / 1e6:6.2f} MB "
                    f"x{row['bytes_ratio']:.2f}  error {row['error']:.1e}  {row['operators']}"
                )
    if arguments.out:
        write_text(arguments.out, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
