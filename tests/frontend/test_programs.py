"""Models with an If on a run-time value, of which one side cannot be a program at the shapes given."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.onnx_models import model
from tests.run_model import run_model
from tvmx.errors import InputError, ModelError
from tvmx.frontend import import_onnx, import_programs
from tvmx.runtime import GraphExecutor


def _branch(name, width):
    """y = x @ w with w of `width` rows: impossible for an x of another width."""
    weight = numpy_helper.from_array(np.full((width, 2), 0.5, np.float32), f"{name}_w")
    out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    node = helper.make_node("MatMul", ["x", f"{name}_w"], [name], f"{name}_product")
    return helper.make_graph([node], name, [], [out], [weight])


def _model(then, otherwise):
    node = helper.make_node("If", ["flag"], ["y"], "rate", then_branch=_branch("a", then),
                            else_branch=_branch("b", otherwise))  # fmt: skip
    return model([node], {"x": (3, "width"), "flag": ((), TensorProto.BOOL)}, {"y": (3, 2)})


@pytest.mark.parametrize("good", [True, False])
def test_the_side_that_fits_runs_and_the_other_is_refused_when_taken(tmp_path, good, caplog):
    proto = _model(*((8, 4) if good else (4, 8)))
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    inputs = {"x": x, "flag": np.array(good)}
    got = run_model(proto, inputs, tmp_path, shapes={"x": (3, 8)})["y"]
    np.testing.assert_allclose(got, np.repeat(x.sum(1, keepdims=True) / 2, 2, 1), rtol=1e-5)
    assert "is left out" in caplog.text
    with GraphExecutor(tmp_path / "m.so") as executor:
        with pytest.raises(InputError, match=r"'flag'.*'rate'.*does not exist at the compiled shapes"):
            executor({**inputs, "flag": np.array(not good)})
        np.testing.assert_array_equal(executor(inputs)["y"], got)


def test_two_sides_that_do_not_fit_are_an_error_when_importing():
    with pytest.raises(ModelError, match="MatMul"):
        import_onnx(_model(8, 8), {"x": (3, 5)})
    with pytest.raises(ModelError, match="MatMul"):
        import_programs(_model(8, 4), {"x": (3, 5)})
