"""RNN, GRU, LSTM unrolled: against ONNX Runtime, ONNX's node tests and a plain numpy loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.rewrite.check import assert_same, backend_cases, bind, check_backend_case, one_node, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import rewrite_all

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def make(
    op: str,
    seed: int = 0,
    sizes: tuple[int, int, int, int] = (4, 3, 5, 6),
    direction: str = "forward",
    bias: bool = True,
    lens: list[int] | None = None,
    h0: bool = False,
    c0: bool = False,
    peephole: bool = False,
    const: bool = True,
    layout: int = 0,
    **attrs: Any,
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    steps, batch, features, hidden = sizes
    d, g = (2 if direction == "bidirectional" else 1), GATES[op]

    def r(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    def state() -> Any:
        return r(batch, d, hidden) if layout else r(d, batch, hidden)

    inputs: dict[str, Any] = {
        "X": r(batch, steps, features) if layout else r(steps, batch, features),
        "W": r(d, g * hidden, features),
        "R": r(d, g * hidden, hidden),
        "B": r(d, 2 * g * hidden) if bias else None,
        "lens": None if lens is None else np.array(lens, np.int32),
        "h0": state() if h0 else None,
    }
    outputs = ["Y", "Y_h"]
    if op == "LSTM":
        inputs["c0"] = state() if c0 else None
        inputs["P"] = r(d, 3 * hidden) if peephole else None
        outputs.append("Y_c")
    fixed = {k: inputs[k] for k in ("W", "R", "B", "P") if const and inputs.get(k) is not None}
    if layout:
        attrs["layout"] = layout
    model = one_node(op, inputs, outputs, fixed, hidden_size=hidden, direction=direction, version=14, **attrs)
    return model, {k: v for k, v in inputs.items() if v is not None and k not in fixed}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(sorted(GATES)),
    seed=st.integers(0, 99),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6)),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    flags=st.fixed_dictionaries({k: st.booleans() for k in ("bias", "h0", "c0", "const")}),
    masked=st.booleans(),
    clip=st.sampled_from([None, 0.3]),
    lbr=st.integers(0, 1),
    peephole=st.booleans(),
    input_forget=st.integers(0, 1),
)
def test_agrees_with_onnxruntime(op, seed, sizes, direction, flags, masked, clip, lbr, peephole, input_forget):
    attrs: dict[str, Any] = {"clip": clip} if clip else {}
    if op == "GRU":
        attrs["linear_before_reset"] = lbr
    if op == "LSTM":
        attrs |= {"peephole": peephole, "input_forget": input_forget}
    lens = list(np.random.default_rng(seed).integers(1, sizes[0] + 1, sizes[1])) if masked else None
    model, feeds = make(op, seed, sizes, direction, lens=lens, **flags, **attrs)
    assert_same(model, feeds, [op])


@pytest.mark.parametrize(
    ("activation", "alpha", "beta"),
    [
        ("Affine", [0.6], [0.1]),
        ("ScaledTanh", [0.7], [1.3]),
        ("LeakyRelu", [0.2], []),
        ("Elu", [0.9], []),
        ("HardSigmoid", [0.3], [0.4]),
        ("ThresholdedRelu", [0.1], []),
        ("Softsign", [], []),
        ("Softplus", [], []),
        ("Relu", [], []),
        ("Sigmoid", [], []),
    ],
)
def test_every_activation(activation, alpha, beta):
    attrs = {"activations": [activation, "Tanh"]}
    attrs |= {"activation_alpha": alpha} if alpha else {}
    attrs |= {"activation_beta": beta} if beta else {}
    model, feeds = make("GRU", h0=True, linear_before_reset=1, **attrs)
    assert_same(model, feeds, ["GRU"])


@pytest.mark.parametrize("op", sorted(GATES))
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_layout_1_is_the_transposed_layout_0(op, direction):
    """ONNX Runtime knows layout 0 only, so the batch-first model is checked against that."""
    kind = {"h0": True, "direction": direction} | ({"c0": True} if op == "LSTM" else {})
    model, feeds = make(op, layout=1, **kind)
    time_first, _ = make(op, layout=0, **kind)
    swapped = {k: np.swapaxes(v, 0, 1) for k, v in feeds.items()}
    expected = ort_run(_with_constants(time_first, model), swapped)
    got = ort_run(rewrite_all(model), feeds)
    np.testing.assert_allclose(got[0], expected[0].transpose(2, 0, 1, 3), rtol=1e-5, atol=1e-6)
    for have, want in zip(got[1:], expected[1:]):
        np.testing.assert_allclose(have, want.transpose(1, 0, 2), rtol=1e-5, atol=1e-6)


def _with_constants(model: onnx.ModelProto, other: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.initializer[:]
    model.graph.initializer.extend(other.graph.initializer)
    return model


@pytest.mark.parametrize("case", backend_cases("lstm", "gru", "simple_rnn", "rnn_seq"))
def test_onnx_node_tests(case):
    check_backend_case(case, ["LSTM", "GRU", "RNN"])


def test_weights_are_combined_into_few_products():
    """One projection for all steps and both directions, then one product a step and direction."""
    model, _ = make("LSTM", direction="bidirectional", h0=True)
    products = [n for n in rewrite_all(model).graph.node if n.op_type == "MatMul"]
    assert len(products) == 1 + 2 * 4


@pytest.mark.parametrize("stored", [False, True])
def test_zero_initial_state_costs_no_product(stored):
    model, _ = make("LSTM", h0=stored)
    if stored:
        model = bind(model, {"h0": np.zeros((1, 3, 6), np.float32)})
    assert sum(n.op_type == "MatMul" for n in rewrite_all(model).graph.node) == 1 + 3


def test_unknown_batch_is_allowed():
    model, feeds = make("LSTM", h0=True, c0=True, lens=[4, 2, 3], direction="bidirectional")
    for value, axis in zip(model.graph.input, (0, None, 1, 1)):
        if axis is not None:
            value.type.tensor_type.shape.dim[1 if value.name != "lens" else 0].dim_param = "N"
    assert_same(model, feeds, ["LSTM"])


def test_unknown_length_is_refused():
    model, _ = make("LSTM")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "T"
    with pytest.raises(ModelError, match=r"node 'the_LSTM' \(LSTM\): dimension 0 .*--shape"):
        rewrite_all(model)


def test_unknown_activation_is_refused():
    model, _ = make("RNN", activations=["Swoosh"])
    with pytest.raises(ModelError, match="Swoosh"):
        rewrite_all(model)
