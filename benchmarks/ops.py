"""One operator at a time against ONNX Runtime, interleaved: which family's default schedule is weak?

python -m benchmarks.ops [--ops softmax,topk] [--threads 1] [--repeat 15] [--out ops.json]

A single operator pays what a network does not: a layout change on both sides, a call of a few microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from benchmarks.measure import interleave, machine, ratio
from benchmarks.peers import onnxruntime_run
from tvmx.config import CompileConfig
from tvmx.report.files import write_text
from tvmx.runtime import GraphExecutor

OPSET = 23


@dataclass(frozen=True)
class Case:
    """One node: its operator, float32 inputs by shape, constant operands after them, attributes."""

    op: str
    shapes: Sequence[tuple[int, ...]]
    constants: Sequence[np.ndarray] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def inputs(self) -> dict[str, np.ndarray]:
        """Seeded random inputs."""
        rng = np.random.default_rng(0)
        return {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(self.shapes)}

    def model(self) -> bytes:
        """A model of this node alone."""
        from onnx import TensorProto, helper, numpy_helper, shape_inference

        names = [f"x{i}" for i in range(len(self.shapes))]
        operands = ["" if c is None else f"c{i}" for i, c in enumerate(self.constants)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, [*names, *operands], outputs, **self.attributes)
        graph = helper.make_graph(
            [node],
            self.op,
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, self.shapes)],
            [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in outputs],
            [numpy_helper.from_array(c, f"c{i}") for i, c in enumerate(self.constants) if c is not None],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
        inferred = shape_inference.infer_shapes(proto, strict_mode=False)
        return bytes(inferred.SerializeToString())


def weights(*shape: int) -> np.ndarray:
    """Seeded weights of a variance that keeps the output's near one."""
    fan = int(np.prod(shape[1:])) or 1
    return (np.random.default_rng(1).standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def cases() -> dict[str, Case]:
    """Every family, at sizes that networks have."""
    image = [(1, 64, 56, 56)]
    rows = [(128, 384)]
    pads = {"pads": [1, 1, 1, 1]}
    index = np.random.default_rng(2).integers(0, 1000, (128,), dtype=np.int64)
    out = {
        "conv 1x1": Case("Conv", image, [weights(128, 64, 1, 1)]),
        "conv 3x3": Case("Conv", image, [weights(64, 64, 3, 3)], pads),
        "conv 3x3 s2": Case("Conv", image, [weights(96, 64, 3, 3)], {**pads, "strides": [2, 2]}),
        "conv 5x5 dilated": Case("Conv", image, [weights(32, 64, 5, 5)], {"dilations": [2, 2]}),
        "conv grouped": Case("Conv", image, [weights(64, 16, 3, 3)], {**pads, "group": 4}),
        "conv depthwise": Case("Conv", image, [weights(64, 1, 3, 3)], {**pads, "group": 64}),
        "conv transposed": Case("ConvTranspose", [(1, 32, 40, 40)], [weights(32, 16, 2, 2)], {"strides": [2, 2]}),
        "conv1d": Case("Conv", [(1, 64, 400)], [weights(64, 64, 5)], {"pads": [2, 2]}),
        "conv1d depthwise": Case("Conv", [(1, 128, 400)], [weights(128, 1, 7)], {"pads": [3, 3], "group": 128}),
        "conv3d": Case("Conv", [(1, 16, 12, 24, 24)], [weights(32, 16, 3, 3, 3)], {"pads": [1] * 6}),
        "max pool": Case("MaxPool", image, (), {"kernel_shape": [3, 3], "strides": [2, 2], **pads}),
        "max pool 2x2": Case("MaxPool", image, (), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        "average pool": Case("AveragePool", image, (), {"kernel_shape": [3, 3], **pads}),
        "global average pool": Case("GlobalAveragePool", image),
        "matmul": Case("MatMul", [(128, 384)], [weights(384, 384)]),
        "gemm transB": Case("Gemm", [(64, 512)], [weights(1000, 512), weights(1000)], {"transB": 1}),
        "gemv": Case("MatMul", [(1, 1024)], [weights(1024, 1024)]),
        "gemv dynamic": Case("MatMul", [(1, 512), (512, 512)]),
        "matrix vector": Case("MatMul", [(512, 512), (512,)]),
        "batch matmul": Case("MatMul", [(12, 128, 32), (12, 32, 128)]),
        "batch matmul wide": Case("MatMul", [(12, 128, 128), (12, 128, 32)]),
        "softmax": Case("Softmax", [(12, 128, 128)]),
        "softmax odd": Case("Softmax", [(64, 197)]),
        "softmax axis 1": Case("Softmax", [(4, 64, 300)], (), {"axis": 1}),
        "layer norm": Case("LayerNormalization", rows, [np.ones(384, np.float32), np.zeros(384, np.float32)]),
        "instance norm": Case("InstanceNormalization", image, [np.ones(64, np.float32), np.zeros(64, np.float32)]),
        "batch norm": Case("BatchNormalization", image, [np.ones(64, np.float32)] * 4),
        "reduce sum last": Case("ReduceSum", [(128, 1000)], [ints(1)]),
        "reduce mean first": Case("ReduceMean", [(200, 640)], [ints(0)]),
        "reduce max middle": Case("ReduceMax", [(16, 60, 100)], [ints(1)]),
        "argmax": Case("ArgMax", [(64, 1000)], (), {"axis": 1}),
        "argmax channels": Case("ArgMax", [(1, 21, 64, 64)], (), {"axis": 1}),
        "cumsum last": Case("CumSum", [(64, 512)], [np.array(1, np.int64)]),
        "cumsum first": Case("CumSum", [(512, 64)], [np.array(0, np.int64)]),
        "topk": Case("TopK", [(8, 1000)], [ints(5)], {"axis": 1}, 2),
        "topk many": Case("TopK", [(1, 8400)], [ints(300)], {"axis": 1}, 2),
        "sort": Case("TopK", [(8, 1000)], [ints(1000)], {"axis": 1}, 2),
        "rms norm": Case("RMSNormalization", rows, [np.ones(384, np.float32)]),
        "gather rows": Case("Gather", [(1000, 384)], [index]),
        "gather columns": Case("Gather", [(64, 1000)], [index], {"axis": 1}),
        "resize nearest": Case("Resize", image, [None, np.array([1, 1, 2, 2], np.float32)], {"mode": "nearest"}),
        "resize linear": Case("Resize", image, [None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
        "transpose 0213": Case("Transpose", [(1, 128, 12, 32)], (), {"perm": [0, 2, 1, 3]}),
        "transpose matrix": Case("Transpose", [(512, 768)], (), {"perm": [1, 0]}),
        "transpose 0231": Case("Transpose", image, (), {"perm": [0, 2, 3, 1]}),
        "transpose 0312": Case("Transpose", [(1, 56, 56, 64)], (), {"perm": [0, 3, 1, 2]}),
        "concat": Case("Concat", [(1, 64, 40, 40), (1, 96, 40, 40)], (), {"axis": 1}),
        "slice": Case("Slice", image, [ints(1, 1), ints(50, 50), ints(2, 3), ints(2, 2)]),
        "pad": Case("Pad", image, [ints(0, 0, 2, 2, 0, 0, 2, 2)]),
        "gelu": Case("Gelu", rows, ()),
        "sigmoid": Case("Sigmoid", image),
        "add broadcast": Case("Add", [(1, 64, 56, 56), (1, 64, 1, 1)]),
    }  # fmt: skip
    return out


def measure(case: Case, threads: int, repeat: int, folder: Path) -> dict[str, Any]:
    """Compile, check against ONNX Runtime, time both in turn."""
    import onnxruntime as ort

    proto, inputs = case.model(), case.inputs()
    path = folder / "op.so"
    result = tvmx.compile(proto, path, threads=threads, config=CompileConfig(use_shipped_logs=False))
    want = ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, inputs)
    with GraphExecutor(path, threads=threads) as executor:
        got = list(executor(inputs).values())
        error = max(float(np.abs(g.astype(np.float64) - w).max(initial=0)) for g, w in zip(got, want))
        for name, array in inputs.items():
            executor.set_input(name, array)
        samples = interleave(
            {"tvmx": executor.run, "onnxruntime": onnxruntime_run(proto, inputs, threads)}, repeat, min_sample_s=5e-4
        )
    return {
        "threads": threads,
        "error": error,
        "rules": result.report["rules"],
        "samples_s": samples,
        "median_us": {k: round(statistics.median(v) * 1e6, 2) for k, v in samples.items()},
        "ratio": round(ratio(samples, "tvmx", "onnxruntime"), 3),
    }


def main() -> int:
    """Measure, print a line an operator, write the JSON. Exit status 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", help="comma-separated parts of names (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.ops.split(",") if arguments.ops else [""]
    rows: dict[str, Any] = {}
    print(f"{'operator':22}{'tvmx us':>10}{'ORT us':>10}{'ratio':>7}{'error':>9}  schedules")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases().items():
            if not any(part in name for part in wanted):
                continue
            try:
                row = rows[name] = measure(case, arguments.threads, arguments.repeat, Path(folder))
            except tvmx.TvmxError as error:
                rows[name] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"{name:22}FAILED: {rows[name]['failed']}", flush=True)
                continue
            us = row["median_us"]
            print(
                f"{name:22}{us['tvmx']:10.1f}{us['onnxruntime']:10.1f}{row['ratio']:7.2f}{row['error']:9.1e}"
                f"  {', '.join(f'{n}x{c}' for n, c in row['rules'].items())}",
                flush=True,
            )
    good = [r["ratio"] for r in rows.values() if "ratio" in r]
    if good:
        print(f"geometric mean of {len(good)}: {statistics.geometric_mean(good):.3f}")
    if arguments.out:
        write_text(arguments.out, json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return 1 if any("failed" in r for r in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
