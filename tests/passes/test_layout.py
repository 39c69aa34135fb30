"""Transposes sink and cancel; what cannot work in another order gets its operands in the logical one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.passes.conftest import assert_equal, assert_same_numbers, emit, operators, program, random_inputs
from tvmx.passes.layout import convert_layout

op = relax.op
RNG = np.random.default_rng(7)


def weight(*shape: int) -> Any:
    return relax.const(RNG.standard_normal(shape).astype("float32") * 0.2)


def moves(mod: Any) -> list[str]:
    return [name for name in operators(mod) if name in ("permute_dims", "reshape")]


def converted(mod: Any) -> Any:
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(convert_layout()(mod)))


def test_convolution_before_and_after() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")) -> R.Tensor(
            (1, 4, 8, 8), "float32"
        ):
            with R.dataflow():
                a: R.Tensor((1, 4, 8, 8), "float32") = R.nn.conv2d(x, w, padding=(1, 1, 1, 1))
                b: R.Tensor((1, 4, 8, 8), "float32") = R.nn.relu(a)
                R.output(b)
            return b

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")) -> R.Tensor(
            (1, 4, 8, 8), "float32"
        ):
            with R.dataflow():
                x_last: R.Tensor((1, 8, 8, 3), "float32") = R.permute_dims(x, [0, 2, 3, 1])
                w_last: R.Tensor((3, 3, 3, 4), "float32") = R.permute_dims(w, [2, 3, 1, 0])
                a: R.Tensor((1, 8, 8, 4), "float32") = R.nn.conv2d(
                    x_last, w_last, padding=(1, 1, 1, 1), data_layout="NHWC", kernel_layout="HWIO"
                )
                b: R.Tensor((1, 8, 8, 4), "float32") = R.nn.relu(a)
                c: R.Tensor((1, 4, 8, 8), "float32") = R.permute_dims(b, [0, 3, 1, 2])
                R.output(c)
            return c

    after = convert_layout()(Before)
    assert_equal(after, Expected)
    assert_same_numbers(Before, after)


def chain(body: Callable[[Any], Any], shape: tuple[Any, ...] = (2, 6, 8, 8)) -> Any:
    """conv → body → conv, so that a body which needs the logical order shows as transposes in the middle."""

    def build(x: Any) -> Any:
        y = emit(body(emit(op.nn.conv2d(x, weight(6, shape[1], 1, 1)))))
        return op.nn.conv2d(y, weight(5, int(y.ty.shape[1]), 1, 1))

    return program([shape], build)


SCALE = RNG.standard_normal((6, 1, 1)).astype("float32")


def swapped(halves: Any) -> Any:
    return op.concat([emit(relax.TupleGetItem(halves, 1)), emit(relax.TupleGetItem(halves, 0))], 1)


def pointwise(y: Any) -> Any:
    return op.nn.conv2d(y, weight(6, 6, 1, 1))


SINKS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda y: op.clip(y, 0, 6),
    "channel constant [C,1,1]": lambda y: op.multiply(y, relax.const(SCALE)),
    "channel constant [1,C,1,1]": lambda y: op.add(y, relax.const(SCALE[None])),
    "constant on the left": lambda y: op.subtract(relax.const(SCALE), y),
    "row constant [W]": lambda y: op.add(y, weight(8)),
    "squeeze and excite": lambda y: op.multiply(y, op.sigmoid(pointwise(op.mean(y, [2, 3], True)))),
    "concat of channels": lambda y: op.concat([y, op.nn.relu(y)], 1),
    "concat with a constant": lambda y: op.concat([y, weight(2, 3, 8, 8)], 1),
    "split": lambda y: swapped(emit(op.split(y, 2, 1))),
    "slice": lambda y: op.strided_slice(y, [1, 2], [1, 0], [5, 8], [1, 2]),
    "pad": lambda y: op.nn.pad(y, (0, 0, 1, 2, 0, 1, 1, 0)),
    "softmax over channels": lambda y: op.nn.softmax(y, 1),
    "max over channels": lambda y: op.max(y, [1], True),
    "mean without its dims and back": lambda y: op.multiply(y, op.expand_dims(op.mean(y, [2, 3]), [2, 3])),
    "max_pool": lambda y: op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1, 1, 1)),
    "avg_pool": lambda y: op.nn.avg_pool2d(y, (2, 2), (2, 2)),
    "adaptive pool": lambda y: op.nn.adaptive_avg_pool2d(y, (2, 2)),
    "resize": lambda y: op.image.resize2d(y, (16, 16), method="nearest_neighbor"),
    "prelu": lambda y: op.nn.prelu(y, weight(6), 1),
    "instance norm": lambda y: op.nn.instance_norm(y, weight(6), weight(6), 1, [2, 3]),
    "depthwise": lambda y: op.nn.conv2d(y, weight(6, 1, 3, 3), padding=(1, 1, 1, 1), groups=6),
    "grouped": lambda y: op.nn.conv2d(y, weight(4, 3, 3, 3), groups=2),
    "to NHWC and back": lambda y: op.permute_dims(op.nn.relu(op.permute_dims(y, [0, 2, 3, 1])), [0, 3, 1, 2]),
    "merge and split H, W": lambda y: op.reshape(op.nn.relu(op.reshape(y, (2, 6, 64))), (2, 6, 4, 16)),
    "cast": lambda y: op.astype(op.astype(y, "float64"), "float32"),
    "where": lambda y: op.where(op.greater(y, relax.const(0.0)), y, op.multiply(y, relax.const(0.1))),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKS)
def test_only_the_ends_are_transposed(name: str) -> None:
    before = chain(SINKS[name])
    after = converted(before)
    assert moves(after).count("permute_dims") == 2
    assert operators(after)[0] == operators(after)[-1] == "permute_dims"
    assert_same_numbers(before, after)


REFUSALS: dict[str, Callable[[Any], Any]] = {
    "reshape that mixes C and H": lambda y: op.reshape(op.nn.relu(op.reshape(y, (2, 48, 8))), (2, 6, 8, 8)),
    "cumsum of all": lambda y: op.reshape(op.cumsum(op.reshape(y, (768,)), 0), (2, 6, 8, 8)),
    "flip (no rule)": lambda y: op.flip(y, 1),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_others_see_the_logical_order(name: str) -> None:
    before = chain(REFUSALS[name])
    after = converted(before)
    assert moves(after).count("permute_dims") == 4
    assert_same_numbers(before, after)


def test_input_that_is_transposed_already_loses_both() -> None:
    before = program(
        [(1, 8, 8, 3)], lambda x: op.nn.relu(op.nn.conv2d(op.permute_dims(x, [0, 3, 1, 2]), weight(4, 3, 3, 3)))
    )
    after = converted(before)
    assert operators(after) == ["nn.conv2d", "nn.relu", "permute_dims"]
    assert_same_numbers(before, after)


def test_transpose_of_unit_dims_is_a_reshape() -> None:
    before = program([(1, 5, 1, 1)], lambda x: op.nn.relu(op.permute_dims(x, [2, 0, 3, 1])))
    after = converted(before)
    assert "permute_dims" not in operators(after)
    assert_same_numbers(before, after)


def test_one_dimensional_convolution_runs_as_an_image_of_height_one() -> None:
    def body(x: Any) -> Any:
        y = op.nn.relu(op.nn.conv1d(x, weight(6, 4, 3), strides=2, padding=(1, 2), dilation=2))
        return op.nn.max_pool1d(op.nn.conv1d(y, weight(3, 6, 1)), 2, 2)

    before = program([(2, 4, 21)], body)
    after = converted(before)
    assert operators(after).count("nn.conv2d") == 2
    assert operators(after).count("permute_dims") == 2
    assert_same_numbers(before, after)


def test_image_of_one_column_becomes_one_of_one_row() -> None:
    def body(x: Any) -> Any:
        return op.nn.relu(op.nn.conv2d(x, weight(6, 4, 5, 1), strides=(2, 1), padding=(2, 0, 1, 0)))

    before = program([(2, 4, 20, 1)], body)
    after = converted(before)
    conv = next(b.value for b in after["main"].body.blocks[0].bindings if "conv2d" in str(b.value.op))
    assert [int(d) for d in conv.ty.shape.values] == [2, 1, 10, 6]
    assert_same_numbers(before, after)


def test_three_dimensional_convolution() -> None:
    before = program([(1, 2, 4, 5, 6)], lambda x: op.nn.relu(op.nn.conv3d(x, weight(3, 2, 3, 3, 3), padding=(1,) * 6)))
    after = converted(before)
    assert operators(after).count("permute_dims") == 2
    assert_same_numbers(before, after)


def test_transposed_convolution_stays_without_a_lowering_of_ours() -> None:
    before = program(
        [(1, 4, 5, 5)], lambda x: op.nn.conv2d_transpose(op.nn.conv2d(x, weight(4, 4, 1, 1)), weight(4, 3, 2, 2))
    )
    after = converted(before)
    assert operators(after)[-1] == "nn.conv2d_transpose"
    assert_same_numbers(before, after)


def test_residual_is_viewed_in_the_shape_of_the_product() -> None:
    """The add stays right behind the matmul, so that it can be its epilogue."""

    def body(x: Any) -> Any:
        y = op.nn.conv2d(x, weight(6, 6, 1, 1))
        rows = op.permute_dims(op.reshape(y, (1, 6, 8)), [0, 2, 1])
        product = op.reshape(op.permute_dims(op.matmul(rows, weight(6, 6)), [0, 2, 1]), (1, 6, 1, 8))
        return op.nn.conv2d(op.add(y, product), weight(3, 6, 1, 1))

    before = program([(1, 6, 1, 8)], body)
    after = converted(before)
    names = operators(after)
    assert names[names.index("matmul") + 1] in ("add", "reshape")
    assert names.count("permute_dims") == 2
    assert_same_numbers(before, after)


def test_symbolic_batch_and_width() -> None:
    def body(x: Any) -> Any:
        y = op.nn.relu(op.nn.conv2d(x, weight(6, 3, 3, 3), padding=(1, 1, 1, 1)))
        y = op.concat([y, op.multiply(y, op.mean(y, [2, 3], True))], 1)
        return op.nn.conv2d(op.clip(y, 0, 6), weight(2, 12, 1, 1))

    before = program([("n", 3, 8, "w")], body)
    after = converted(before)
    assert moves(after) == ["permute_dims", "permute_dims"]
    assert_same_numbers(before, after, random_inputs(before, {"n": 2, "w": 9}))


def test_quantised_tensor_keeps_its_channel_axis() -> None:
    scale, zero = relax.const(np.full(6, 0.05, "float32")), relax.const(np.zeros(6, "int8"))

    def body(y: Any) -> Any:
        return op.dequantize(op.quantize(y, scale, zero, 1, "int8"), scale, zero, 1, "float32")

    before = chain(body)
    after = converted(before)
    assert moves(after).count("permute_dims") == 2
    assert_same_numbers(before, after, rtol=0.06)  # a value on a rounding boundary may take the other step


def test_weights_that_are_no_constants_are_transposed_at_run_time() -> None:
    before = program([(1, 3, 8, 8), (4, 3, 1, 1)], lambda x, w: op.nn.conv2d(x, w))
    assert operators(converted(before)).count("permute_dims") == 3


def test_the_caller_keeps_its_module() -> None:
    before = chain(SINKS["clip"])
    text = before.script()
    convert_layout()(before)
    assert before.script() == text
