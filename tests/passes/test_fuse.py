"""Which kernels are joined, and which are not although TVM would."""

import numpy as np
import pytest
from onnx import helper

import tvmx
from tests.onnx_models import assert_close, model, reference
from tests.run_model import run_model


@pytest.mark.parametrize(("op", "kernels"), [("Abs", 1), ("Tanh", 3), ("Log", 5), ("Mish", 9)])
def test_a_chain_is_cut_before_its_code_explodes(op, kernels, tmp_path):
    """Seven of exp, tanh, … in one another took TVM's code generator minutes, each further one eleven times that."""
    nodes = []
    for i in range(9):
        nodes.append(helper.make_node(op, [f"t{i}"], [f"u{i}"]))
        nodes.append(helper.make_node("Add", [f"u{i}", "three"], [f"t{i + 1}"]))
    proto = model(nodes, {"t0": (4, 33)}, {"t9": (4, 33)}, {"three": np.float32(3)}, 18)
    assert len(tvmx.compile(proto, tmp_path / "n.so", threads=1).graph.nodes) == kernels
    x = np.random.default_rng(0).uniform(1, 3, (4, 33)).astype(np.float32)
    assert_close(run_model(proto, {"t0": x}, tmp_path), reference(proto, {"t0": x}))
