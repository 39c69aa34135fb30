"""Convolution layers of the zoo one by one: our untuned kernel against a single-Conv model in the peers.

python -m benchmarks.layers_conv [--models orient,yolox] [--threads 1] [--repeat 15] [--top 20] [--out layers.json]

A peer's single-Conv model also pays the reorder of its input and output to the peer's own layout, which a network
pays once; our kernel is given NHWC. Read the GFLOP/s against the machine's peak, and use benchmarks.latency for claims.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import interleave, machine
from benchmarks.models import zoo
from benchmarks.peers import onnxruntime_run, openvino_run
from tvmx.target import Target, resolve

CONV_MODELS = ("resnet18", "orient", "ppocr4-det", "ppocr4-rec", "yolox", "speech-embed")


@dataclass(frozen=True)
class Layer:
    """A Conv node: x is (N, C, H, W), w (O, I, KH, KW), pads (top, left, bottom, right)."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    dilations: tuple[int, int]
    group: int

    @property
    def output(self) -> tuple[int, int, int, int]:
        spans = [(k - 1) * d + 1 for k, d in zip(self.w[2:], self.dilations)]
        oh = (self.x[2] + self.pads[0] + self.pads[2] - spans[0]) // self.strides[0] + 1
        ow = (self.x[3] + self.pads[1] + self.pads[3] - spans[1]) // self.strides[1] + 1
        return self.x[0], self.w[0], oh, ow

    @property
    def flops(self) -> int:
        return 2 * int(np.prod(self.output)) * int(np.prod(self.w[1:]))

    def __str__(self) -> str:
        n, c, h, w = self.x
        text = f"{n}x{c}@{h}x{w} {self.w[2]}x{self.w[3]} -> {self.w[0]} s{self.strides[0]}{self.strides[1]}"
        return text + (f" g{self.group}" if self.group > 1 else "")


def layers_of(name: str) -> dict[Layer, int]:
    """Distinct Conv nodes of a zoo model → how often each occurs."""
    import onnx
    import onnxslim

    model = next(m for m in zoo() if m.name == name)
    shapes = [f"{k}:{','.join(map(str, s))}" for k, s in model.shapes.items()]
    proto = onnx.shape_inference.infer_shapes(
        onnxslim.slim(onnx.load(model.path), input_shapes=shapes, model_check=False)
    )
    graph = proto.graph
    dims = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in (*graph.value_info, *graph.input)}
    weights = {i.name: tuple(i.dims) for i in graph.initializer}
    found: collections.Counter[Layer] = collections.Counter()
    for node in graph.node:
        if node.op_type != "Conv" or len(weights.get(node.input[1], ())) != 4:
            continue
        a = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
        found[
            Layer(
                dims[node.input[0]],
                weights[node.input[1]],
                tuple(a.get("strides", (1, 1))),  # type: ignore[arg-type]
                tuple(a.get("pads", (0, 0, 0, 0))),  # type: ignore[arg-type]
                tuple(a.get("dilations", (1, 1))),  # type: ignore[arg-type]
                a.get("group", 1),
            )
        ] += 1
    return dict(found)


def kernel(layer: Layer, target: Target) -> tuple[Any, list[Any]]:
    """(callable kernel, its arguments) of Conv + bias + ReLU over NHWC, default schedule."""
    import tvm
    from tvm import relax, tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import apply_default

    n, c, h, w = layer.x
    out, depth, kh, kw = layer.w
    rng = np.random.default_rng(0)
    weight = relax.const(rng.standard_normal((kh, kw, depth, out)).astype("float32"))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, h, w, c), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(
                relax.op.nn.conv2d(
                    x,
                    weight,
                    strides=list(layer.strides),
                    padding=list(layer.pads),
                    dilation=list(layer.dilations),
                    groups=layer.group,
                    data_layout="NHWC",
                    kernel_layout="HWIO",
                )
            )
            bias = relax.const(rng.standard_normal((1, 1, 1, out)).astype("float32"))
            y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, bias))))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    module = run_phases(builder.get(), target)
    functions = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(functions) != 1:
        raise RuntimeError(f"{layer}: {len(functions)} kernels where one was expected")
    scheduled = apply_default(functions[0], target).func.with_attr("global_symbol", "main")
    executable = tvm.compile(tvm.IRModule({"main": scheduled}), target.tvm())
    arguments = [
        tvm.runtime.tensor(rng.standard_normal([int(d) for d in p.shape]).astype("float32")) for p in scheduled.params
    ]
    return executable, arguments


def peer_model(layer: Layer) -> bytes:
    """Conv + bias + ReLU as a serialised ONNX model."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.standard_normal(layer.w).astype("float32"), "w")
    b = numpy_helper.from_array(rng.standard_normal(layer.w[0]).astype("float32"), "b")
    conv = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["c"],
        strides=layer.strides,
        pads=layer.pads,
        dilations=layer.dilations,
        group=layer.group,
        kernel_shape=layer.w[2:],
    )
    graph = helper.make_graph(
        [conv, helper.make_node("Relu", ["c"], ["y"])],
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, layer.x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, layer.output)],
        [w, b],
    )
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    )


def measure(layer: Layer, target: Target, repeat: int, peers: bool) -> dict[str, float]:
    """Seconds of the best sample of each contender."""
    run, arguments = kernel(layer, target)
    contenders: dict[str, Any] = {"tvmx": lambda: run(*arguments)}
    if peers:
        x = {"x": np.random.default_rng(1).standard_normal(layer.x).astype("float32")}
        model = peer_model(layer)
        contenders["ort"] = onnxruntime_run(model, x, target.threads)
        contenders["openvino"] = openvino_run(model, x, target.threads)
    samples = interleave({k: v for k, v in contenders.items() if v}, repeat=repeat, min_sample_s=1e-3)
    return {name: min(values) for name, values in samples.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONV_MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--top", type=int, default=1000, help="only the layers with the most MACs of each model")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    os.environ["TVM_NUM_THREADS"] = str(options.threads)  # TVM's own pool runs the bare kernels here
    target = resolve("native", threads=options.threads)
    rows: list[dict[str, Any]] = []
    known: dict[Layer, dict[str, float]] = {}
    for name in options.models.split(","):
        layers = sorted(layers_of(name).items(), key=lambda item: -item[0].flops * item[1])[: options.top]
        totals: collections.Counter[str] = collections.Counter()
        print(f"{name}, {options.threads} thread(s)")
        for layer, count in layers:
            if layer not in known:
                known[layer] = measure(layer, target, options.repeat, not options.no_peers)
            seconds = known[layer]
            rate = layer.flops / seconds["tvmx"] / 1e9
            for contender, value in seconds.items():
                totals[contender] += value * count
            ratios = "  ".join(
                f"{k} {v * 1e3:7.3f} ({seconds['tvmx'] / v:4.2f})" for k, v in seconds.items() if k != "tvmx"
            )
            print(f"  {count}x {layer!s:42} {seconds['tvmx'] * 1e3:7.3f} ms {rate:6.1f} GFLOP/s  {ratios}", flush=True)
            rows.append({"model": name, "count": count, "layer": str(layer), "seconds": seconds})
        print("  sum " + "  ".join(f"{k} {v * 1e3:.2f} ms" for k, v in totals.items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "threads": options.threads, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
