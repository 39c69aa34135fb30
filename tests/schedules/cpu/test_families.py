"""Random odd shapes of every operator family, compiled for each instruction set, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import tvmx
from tests.onnx_models import reference
from tests.schedules.cpu.relax_case import RUNNABLE, no_refusals
from tvmx.config import CompileConfig
from tvmx.runtime import GraphExecutor

Rng = np.random.Generator


@dataclass(frozen=True)
class Node:
    """An operator with its inputs and the constants that follow them (None: left out)."""

    op: str
    inputs: list[np.ndarray]
    constants: list[np.ndarray | None] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


def normal(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pick(rng: Rng, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def between(rng: Rng, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def conv(rank: int) -> Callable[[Rng], Node]:
    def make(rng: Rng) -> Node:
        groups = pick(rng, 1, 1, 2, 3) if rank < 3 else 1
        depth, out = between(rng, 1, 9), between(rng, 1, 11)
        kernel = [between(rng, 1, 3) for _ in range(rank)]
        dilation = [between(rng, 1, 2) for _ in range(rank)]
        size = [(k - 1) * d + between(rng, 1, 12) for k, d in zip(kernel, dilation)]
        return Node(
            "Conv",
            [normal(rng, between(rng, 1, 2), groups * depth, *size)],
            [normal(rng, groups * out, depth, *kernel), normal(rng, groups * out)],
            {
                "group": groups,
                "strides": [between(rng, 1, 3) for _ in range(rank)],
                "dilations": dilation,
                "pads": [between(rng, 0, 2) for _ in range(2 * rank)],
            },
        )

    return make


def depthwise(rng: Rng) -> Node:
    channels, rank = between(rng, 2, 37), pick(rng, 1, 2)
    kernel = [between(rng, 2, 5) for _ in range(rank)]
    return Node(
        "Conv",
        [normal(rng, 1, channels, *[between(rng, 6, 17) for _ in range(rank)])],
        [normal(rng, channels, 1, *kernel)],
        {"group": channels, "strides": [pick(rng, 1, 2)] * rank, "pads": [between(rng, 0, 2) for _ in range(2 * rank)]},
    )


def transposed(rng: Rng) -> Node:
    depth, out, kernel = between(rng, 1, 20), between(rng, 1, 20), [between(rng, 2, 4) for _ in range(2)]
    return Node(
        "ConvTranspose",
        [normal(rng, 1, depth, between(rng, 3, 9), between(rng, 3, 9))],
        [normal(rng, depth, out, *kernel)],
        {"strides": [between(rng, 1, 3) for _ in range(2)], "pads": [between(rng, 0, 1) for _ in range(4)]},
    )


def pool(op: str) -> Callable[[Rng], Node]:
    def make(rng: Rng) -> Node:
        kernel = [between(rng, 2, 4) for _ in range(2)]
        attributes: dict[str, Any] = {
            "kernel_shape": kernel,
            "strides": [between(rng, 1, 3) for _ in range(2)],
            "pads": [between(rng, 0, k - 1) for k in kernel * 2],
            "ceil_mode": pick(rng, 0, 1),
        }
        if op == "AveragePool":
            attributes["count_include_pad"], attributes["ceil_mode"] = pick(rng, 0, 1), 0
        return Node(op, [normal(rng, 1, between(rng, 1, 35), between(rng, 6, 19), between(rng, 6, 19))], [], attributes)

    return make


def matmul(rng: Rng) -> Node:
    m, n, k = between(rng, 1, 40), between(rng, 1, 70), between(rng, 1, 70)
    batch = pick(rng, (), (3,), (2, 3))
    other = pick(rng, (), batch)
    b = normal(rng, *other, k, n)
    a = normal(rng, *batch, m, k)
    return Node("MatMul", [a], [b]) if pick(rng, 0, 1) else Node("MatMul", [a, b])


def gemm(rng: Rng) -> Node:
    m, n, k = between(rng, 1, 30), between(rng, 1, 70), between(rng, 1, 70)
    flip_a, flip_b = pick(rng, 0, 1), pick(rng, 0, 1)
    a = normal(rng, *((k, m) if flip_a else (m, k)))
    b = normal(rng, *((n, k) if flip_b else (k, n)))
    attributes = {"transA": flip_a, "transB": flip_b, "alpha": 0.5, "beta": 2.0}
    return Node("Gemm", [a], [b, normal(rng, n)], attributes)


def gemv(rng: Rng) -> Node:
    n, k = between(rng, 1, 90), between(rng, 1, 200)
    a, b = pick(rng, ((1, k), (k, n)), ((n, k), (k,)), ((k,), (k, n)))
    return Node("MatMul", [normal(rng, *a), normal(rng, *b)])


def norm(op: str) -> Callable[[Rng], Node]:
    def make(rng: Rng) -> Node:
        if op == "LayerNormalization":
            length = between(rng, 2, 150)
            x = normal(rng, between(rng, 1, 7), length) * 3 + 50
            return Node(op, [x], [normal(rng, length), normal(rng, length)])
        if op == "RMSNormalization":
            length = between(rng, 2, 150)
            return Node(op, [normal(rng, between(rng, 1, 7), length)], [normal(rng, length)])
        if op == "GroupNormalization":
            groups, members = between(rng, 1, 4), between(rng, 1, 5)
            x = normal(rng, between(rng, 1, 2), groups * members, between(rng, 3, 9), between(rng, 3, 9))
            affine = [normal(rng, groups * members), normal(rng, groups * members)]
            return Node(op, [x], affine, {"num_groups": groups})
        channels = between(rng, 1, 20)
        shape = (between(rng, 1, 2), channels, *[between(rng, 3, 9) for _ in range(pick(rng, 1, 2))])
        return Node(op, [normal(rng, *shape) * 3 + 50], [normal(rng, channels), normal(rng, channels)])

    return make


def softmax(rng: Rng) -> Node:
    shape = [between(rng, 1, 40) for _ in range(3)]
    return Node(pick(rng, "Softmax", "LogSoftmax"), [normal(rng, *shape) * 4], [], {"axis": between(rng, 0, 2)})


def reduction(rng: Rng) -> Node:
    shape = [between(rng, 1, 40) for _ in range(3)]
    axes = pick(rng, [0], [1], [2], [1, 2], [0, 2], [0, 1, 2])
    op = pick(rng, "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
    return Node(op, [normal(rng, *shape)], [np.array(axes, np.int64)], {"keepdims": pick(rng, 0, 1)})


def argument(rng: Rng) -> Node:
    x = rng.integers(0, 6, [between(rng, 1, 30) for _ in range(3)]).astype(np.float32)  # with ties
    attributes = {"axis": between(rng, 0, 2), "select_last_index": pick(rng, 0, 1)}
    return Node(pick(rng, "ArgMax", "ArgMin"), [x], [], attributes)


def cumulative(rng: Rng) -> Node:
    x, axis = normal(rng, *[between(rng, 1, 20) for _ in range(3)]), np.array(between(rng, 0, 2), np.int64)
    return Node("CumSum", [x], [axis], {"exclusive": pick(rng, 0, 1), "reverse": pick(rng, 0, 1)})


def top_k(rng: Rng) -> Node:
    shape, axis = [between(rng, 2, 60) for _ in range(2)], between(rng, 0, 1)
    x = rng.integers(0, 12, shape).astype(np.float32)  # with ties: the lower index comes first
    k = np.array([between(rng, 1, shape[axis])], np.int64)
    return Node("TopK", [x], [k], {"axis": axis, "largest": pick(rng, 0, 1)}, outputs=2)


def gather(rng: Rng) -> Node:
    shape, axis = [between(rng, 2, 20) for _ in range(3)], between(rng, 0, 2)
    indices = rng.integers(-shape[axis], shape[axis], [between(rng, 1, 6) for _ in range(pick(rng, 1, 2))])
    return Node("Gather", [normal(rng, *shape), indices.astype(np.int64)], [], {"axis": axis})


def resize(rng: Rng) -> Node:
    x = normal(rng, 1, between(rng, 1, 18), between(rng, 3, 9), between(rng, 3, 9))
    scales = np.array([1, 1, pick(rng, 0.5, 2, 1.7), pick(rng, 2, 3)], np.float32)
    mode = pick(rng, {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}, {"mode": "linear"})
    return Node("Resize", [x], [None, scales], {**mode})


def permute(rng: Rng) -> Node:
    rank = between(rng, 2, 4)
    shape = [between(rng, 1, 40 if rank < 4 else 18) for _ in range(rank)]
    return Node("Transpose", [normal(rng, *shape)], [], {"perm": [int(i) for i in rng.permutation(rank)]})


FAMILIES: dict[str, Callable[[Rng], Node]] = {
    "conv1d": conv(1), "conv2d": conv(2), "conv3d": conv(3), "depthwise": depthwise, "transposed": transposed,
    "max pool": pool("MaxPool"), "average pool": pool("AveragePool"), "matmul": matmul, "gemm": gemm, "gemv": gemv,
    "layer norm": norm("LayerNormalization"), "instance norm": norm("InstanceNormalization"),
    "group norm": norm("GroupNormalization"), "rms norm": norm("RMSNormalization"), "softmax": softmax,
    "reduction": reduction, "argmax": argument, "cumsum": cumulative, "topk": top_k, "gather": gather,
    "resize": resize, "transpose": permute,
}  # fmt: skip


def model(nodes: list[Node]) -> tuple[Any, dict[str, np.ndarray]]:
    """Independent nodes side by side in one model: one build for many shapes."""
    from onnx import TensorProto, helper, numpy_helper

    made, inputs, weights, outputs, feed = [], [], [], [], {}
    for at, node in enumerate(nodes):
        names = []
        for i, array in enumerate(node.inputs):
            kind = TensorProto.FLOAT if array.dtype == np.float32 else TensorProto.INT64
            names.append(f"x{at}_{i}")
            inputs.append(helper.make_tensor_value_info(names[-1], kind, array.shape))
            feed[names[-1]] = array
        for i, array in enumerate(node.constants):
            names.append(f"w{at}_{i}" if array is not None else "")
            if array is not None:
                weights.append(numpy_helper.from_array(array, names[-1]))
        results = [f"y{at}_{i}" for i in range(node.outputs)]
        made.append(helper.make_node(node.op, names, results, **node.attributes))
        for i, name in enumerate(results):
            whole = node.op.startswith("Arg") or (node.op == "TopK" and i == 1)
            kind = TensorProto.INT64 if whole else TensorProto.FLOAT
            shape = node.inputs[0].shape if node.op == "GroupNormalization" else None  # not inferred
            outputs.append(helper.make_tensor_value_info(name, kind, shape))
    graph = helper.make_graph(made, "test", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=9)
    from onnx import shape_inference

    return shape_inference.infer_shapes(proto), feed


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_shapes(family: str, target: str, tmp_path: Any, caplog: Any) -> None:
    rng = np.random.default_rng(sum(map(ord, family)))
    nodes = [FAMILIES[family](rng) for _ in range(4)]
    proto, feed = model(nodes)
    expected = reference(proto, feed)
    config = CompileConfig(use_shipped_logs=False)
    result = tvmx.compile(proto.SerializeToString(), tmp_path / "m.so", target=target, threads=2, config=config)
    assert no_refusals(caplog)
    assert "unscheduled" not in result.report["rules"]
    with GraphExecutor(result.path, threads=2) as executor:
        got = executor(feed)
    for name, want in expected.items():
        assert got[name].shape == want.shape, nodes[int(name[1:].split("_")[0])]
        if want.dtype.kind == "i":
            np.testing.assert_array_equal(got[name], want)
            continue
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got[name], want, rtol=0, atol=3e-5 * scale, err_msg=str(name))


@pytest.mark.parametrize("family", ["conv2d", "conv3d", "depthwise", "matmul", "softmax", "max pool", "transpose"])
def test_builds_for_neon(family: str, tmp_path: Any) -> None:
    """The kernels compile to aarch64 objects; linking needs a cross compiler and is tested with the executor."""
    from tvmx.executor.kernels import compile_kernels
    from tvmx.schedule import apply_default
    from tvmx.target import resolve

    target = resolve("aarch64-neon", 2)
    proto, _ = model([FAMILIES[family](np.random.default_rng(5)) for _ in range(3)])
    lowered = tvmx.api.lower(tvmx.import_onnx(proto.SerializeToString()), target)
    import tvm

    kernels = {}
    for gv, func in lowered.mod.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            scheduled = apply_default(func, target)
            assert scheduled.rule != "unscheduled"
            kernels[gv.name_hint] = scheduled.func.with_attr("global_symbol", gv.name_hint)
    objects, _ = compile_kernels(kernels, target, tmp_path, 1)
    assert all(path.read_bytes()[:4] == b"\x7fELF" and path.read_bytes()[18] == 0xB7 for path in objects)
