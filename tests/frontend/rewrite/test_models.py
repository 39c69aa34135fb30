"""Real models: rewritten and original agree in ONNX Runtime, and no foreign operator is left."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.models import ModelUnavailable, model_path
from tests.frontend.rewrite.check import assert_same, ops_of, ort_run
from tvmx.frontend.rewrite import rewrite_all, split_if

RNG = np.random.default_rng(0)
IDS = {"input_ids": RNG.integers(1000, 20000, (1, 32)), "attention_mask": np.ones((1, 32), np.int64)}
FRAME = (RNG.standard_normal((1, 576)) * 0.1).astype(np.float32)
STATE = (RNG.standard_normal((2, 1, 128)) * 0.1).astype(np.float32)
VAD = {"input": FRAME, "state": STATE, "sr": np.array(16000)}

CASES = {
    "ddddocr-old": {"input1": RNG.random((1, 1, 64, 96)).astype(np.float32)},
    "traceforge": IDS,
    "minilm-l6-int8": {**IDS, "token_type_ids": np.zeros((1, 32), np.int64)},
    "silero-vad-half": VAD,
    "silero-vad-op15": VAD,
    "silero-vad-openvino": VAD,
    "silero-vad-sequence": {"input": np.repeat(FRAME, 5, 0), "h": STATE[:1], "c": STATE[1:]},
}
GONE = ["LSTM", "If", "Loop", "Scan", "ConvInteger", "DynamicQuantizeLSTM", "Shape"]


def load(name, feeds):
    """The model with its input shapes fixed to those of `feeds`."""
    try:
        model = onnx.load(model_path(name))
    except ModelUnavailable as reason:
        pytest.skip(str(reason))
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape):
            dim.dim_value = size
    return model


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(CASES))
def test_model_is_unchanged_in_value(name):
    feeds = CASES[name]
    rewritten = assert_same(load(name, feeds), feeds, GONE, rtol=1e-4, atol=1e-4)
    assert all(n.domain in ("", "ai.onnx") for n in rewritten.graph.node)


@pytest.mark.models
@pytest.mark.parametrize("name", ["silero-vad", "silero-vad-if"])
@pytest.mark.parametrize(("rate", "length"), [(16000, 576), (8000, 288)])
def test_model_that_is_one_if_becomes_two_programs(name, rate, length):
    """Each sampling rate has its own frame length; at it, the program the condition picks works."""
    feeds = {**VAD, "input": FRAME[:, :length], "sr": np.array(rate)}
    model = load(name, feeds)
    split = split_if(model)
    assert [i.name for i in split.condition.graph.input] == ["sr"]
    program = split.then if ort_run(split.condition, feeds)[0] else split.otherwise
    assert split_if(program) is None
    rewritten = rewrite_all(program)
    assert not ops_of(rewritten) & set(GONE)
    for have, want in zip(ort_run(rewritten, feeds), ort_run(model, feeds)):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.models
def test_int8_weights_are_not_turned_into_floats():
    feeds = CASES["ddddocr-old"]
    model = load("ddddocr-old", feeds)
    sizes = [sum(t.ByteSize() for t in m.graph.initializer) for m in (model, rewrite_all(model))]
    assert sizes[1] < sizes[0] * 1.02
