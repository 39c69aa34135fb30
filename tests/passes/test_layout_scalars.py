"""A scalar that is only a recorded reshape must be made before an element-wise operator reads it."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from tests.passes.conftest import assert_same_numbers, operators
from tvmx.passes.layout import convert_layout


@I.ir_module
class ScalarFromVector:
    @R.function
    def main(x: R.Tensor((4, 3), "float32"), zero: R.Tensor((1,), "float32")) -> R.Tensor((4, 3), "float32"):
        with R.dataflow():
            scalar: R.Tensor((), "float32") = R.reshape(zero, R.shape([]))
            moved: R.Tensor((), "float32") = R.negative(scalar)
            y: R.Tensor((4, 3), "float32") = R.add(x, scalar)
            z: R.Tensor((4, 3), "float32") = R.multiply(y, moved)
            R.output(z)
        return z


def test_a_reshape_to_rank_0_is_not_lost() -> None:
    after = convert_layout()(ScalarFromVector)
    assert "reshape" in operators(after)
    assert_same_numbers(ScalarFromVector, after)
