"""Any plan is a valid program: random assignments on small graphs, against ONNX Runtime in float32."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.onnx_models import convnet, model, reference
from tests.passes.precision.helpers import CPU, GPU, assigned, imported, run
from tvmx.passes.precision.operators import list_operators
from tvmx.precision import Assignment, PrecisionRules

node = helper.make_node
rng = np.random.default_rng(0)


def _attention():
    """Products of two computed operands, softmax, a residual, a norm, slices and a concatenation."""
    w = {f"w{i}": (rng.standard_normal((8, 8)) / 3).astype("f4") for i in range(3)}
    return model(
        [
            node("LayerNormalization", ["x", "g", "b"], ["n"]),
            *(node("MatMul", ["n", f"w{i}"], [f"p{i}"]) for i in range(3)),
            node("Transpose", ["p1"], ["t"], perm=[0, 2, 1]),
            node("MatMul", ["p0", "t"], ["scores"]),
            node("Softmax", ["scores"], ["s"]),
            node("MatMul", ["s", "p2"], ["o"]),
            node("Add", ["o", "x"], ["r"]),
            node("Gelu", ["r"], ["e"]),
            node("Split", ["e"], ["left", "right"], axis=2, num_outputs=2),
            node("Concat", ["right", "left"], ["c"], axis=2),
            node("ReduceMean", ["c", "axes"], ["m"]),
            node("Where", ["mask", "c", "m"], ["y"]),
        ],
        {"x": (2, 5, 8)}, {"y": (2, 5, 8), "s": (2, 5, 5)},
        {**w, "g": np.ones(8, "f4"), "b": np.zeros(8, "f4"), "axes": np.array([1]),
         "mask": np.arange(8) % 2 == 0}, opset=20,
    )  # fmt: skip


def _images():
    """Strided, grouped and transposed convolutions, pools, padding."""

    def w(*s):
        return (rng.standard_normal(s) / np.sqrt(np.prod(s[1:]))).astype("f4")

    return model(
        [
            node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
            node("Conv", ["a", "w1"], ["d"], pads=[1, 1, 1, 1], group=4),
            node("MaxPool", ["d"], ["p"], kernel_shape=[2, 2]),
            node("ConvTranspose", ["p", "w2"], ["u"], strides=[2, 2]),
            node("Pad", ["u", "pads"], ["q"]),
            node("AveragePool", ["q"], ["v"], kernel_shape=[2, 2]),
            node("Sigmoid", ["v"], ["y"]),
        ],
        {"x": (1, 3, 8, 8)}, {"y": (1, 2, 4, 4)},
        {"w0": w(4, 3, 3, 3), "w1": w(4, 1, 3, 3), "w2": w(4, 2, 2, 2), "pads": np.array([0, 0, 0, 0, 0, 0, 1, 1])},
    )  # fmt: skip


GRAPHS = {"attention": _attention, "images": _images, "convnet": convnet}


@functools.cache
def _case(name):
    proto = GRAPHS[name]()
    shape = tuple(d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim)
    x = np.random.default_rng(3).standard_normal(shape).astype("f4")
    mod = imported(proto)
    names = [op.name for _, op in list_operators(mod)]
    return mod, names, x, list(reference(proto, {"x": x}).values())


CHOICES = [Assignment("fp32"), Assignment("fp16"), Assignment("bf16"), Assignment("fp16", "fp16")]


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_random_plans_run_and_agree(graph, data):
    mod, names, x, want = _case(graph)
    chosen = {n: data.draw(st.sampled_from(CHOICES), label=n) for n in names}
    target = data.draw(st.sampled_from([GPU, CPU]))
    io = data.draw(st.sampled_from(["keep", "fp16"]))
    rules = PrecisionRules(operators=chosen, io=io, prefer="size")
    cast, plan = assigned(mod, rules, target)
    assert {e.name: e.assignment for e in plan.entries} == chosen
    x = x.astype("f2" if io == "fp16" else "f4")
    for found, exact in zip(run(cast, x), want, strict=True):
        assert found.dtype == x.dtype
        # bfloat16 keeps 8 bits; errors of a handful of roundings add up
        np.testing.assert_allclose(found.astype("f8"), exact, rtol=0, atol=0.06 * max(1.0, np.abs(exact).max()))
