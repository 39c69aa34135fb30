"""Helpers of the rewrite tests: run a model before and after rewriting, and one-node models."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from tvmx.frontend.rewrite import rewrite_all

Run = Callable[[onnx.ModelProto, Mapping[str, Any]], list[Any]]


def ort_run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Outputs of ONNX Runtime without graph optimisation, one thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    names = {i.name for i in model.graph.input}
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, {k: v for k, v in feeds.items() if k in names})


def one_node(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] = ("y",),
    constants: Mapping[str, Any] | None = None,
    version: int = 17,
    domain: str = "",
    absent: Sequence[int] = (),
    out_elem: int = TensorProto.FLOAT,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node. `inputs` in order; those in `constants` are initializers.

    A value of None is an absent input.
    """
    constants = constants or {}
    both = dict(inputs)
    names = ["" if value is None else key for key, value in both.items()]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op, names, list(outputs), f"the_{op}", domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in both.items()
            if v is not None and k not in constants
        ],
        [helper.make_tensor_value_info(o, out_elem, None) for o in outputs if o],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def ops_of(model: onnx.ModelProto) -> set[str]:
    """Operator types of the main graph."""
    return {n.op_type for n in model.graph.node}


def assert_same(
    model: onnx.ModelProto,
    feeds: Mapping[str, Any],
    gone: Sequence[str] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
    run: Run = ort_run,
) -> onnx.ModelProto:
    """Rewrite, check that `gone` operators left and outputs are the same; returns the result."""
    rewritten = rewrite_all(model)
    left = ops_of(rewritten) & set(gone)
    assert not left, f"still there: {left}"
    assert [i.name for i in rewritten.graph.input] == [i.name for i in model.graph.input]
    assert [o.name for o in rewritten.graph.output] == [o.name for o in model.graph.output]
    expected, got = run(model, feeds), ort_run(rewritten, feeds)
    for name, want, have in zip([o.name for o in model.graph.output], expected, got):
        assert have.dtype == want.dtype, name
        assert have.shape == want.shape, name
        np.testing.assert_allclose(have, want, rtol=rtol, atol=atol, err_msg=name)
    return rewritten


def backend_cases(*prefixes: str, required: bool = True) -> list[Any]:
    """ONNX's own node tests whose name is a prefix, or a prefix and `_more`.

    Not `required`: this version of onnx may not have them.
    """
    cases = []
    for case in _all_cases():
        name = case.name.removeprefix("test_")
        if any(name == p or name.startswith(p + "_") for p in prefixes):
            cases.append(pytest.param(case, id=name))
    assert cases or not required, prefixes
    return cases


@functools.cache
def _all_cases() -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the generators overflow and divide by zero on purpose
        return [c for c in load_model_tests(kind="node") if not c.name.endswith("_expanded")]


def bind(model: onnx.ModelProto, values: Mapping[str, Any]) -> onnx.ModelProto:
    """A copy of the model with those inputs made initializers, as constants={...} does."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [i for i in copy.graph.input if i.name not in values]
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in values.items())
    return copy


def run_anywhere(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """ONNX Runtime, or onnx.reference for operators or opsets that it does not have."""
    try:
        return ort_run(model, feeds)
    except (NotImplemented_, Fail, InvalidGraph):
        names = {i.name for i in model.graph.input}
        return ReferenceEvaluator(model).run(None, {k: v for k, v in feeds.items() if k in names})


def check_backend_case(case: Any, gone: Sequence[str] = (), atol: float = 1e-6, bound: Sequence[str] = ()) -> None:
    """Rewrite the model of an ONNX node test; running it must give the stored outputs.

    `bound` inputs are parameters (an axis, a shape): they become constants first.
    """
    if case.model is not None:  # onnx >= 1.23 makes the cases on the fly
        model, (inputs, expected) = case.model, case.data_sets[0]
    else:
        model = onnx.load(os.path.join(case.model_dir, "model.onnx"))
        folder = os.path.join(case.model_dir, "test_data_set_0")
        inputs = [_tensor(folder, "input", k) for k in range(len(model.graph.input))]
        expected = [_tensor(folder, "output", k) for k in range(len(model.graph.output))]
    feeds = {i.name: _array(v) for i, v in zip(model.graph.input, inputs)}
    model = bind(model, {k: v for k, v in feeds.items() if k in bound})
    rewritten = rewrite_all(model)
    left = ops_of(rewritten) & set(gone)
    assert not left, f"still there: {left}"
    rewritten.ir_version = min(rewritten.ir_version, 11)  # what ONNX Runtime may lag behind in
    for have, want in zip(run_anywhere(rewritten, feeds), map(_array, expected)):
        assert have.shape == want.shape
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=max(case.rtol, 1e-5), atol=atol)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _tensor(folder: str, kind: str, index: int) -> Any:
    proto = onnx.load_tensor(os.path.join(folder, f"{kind}_{index}.pb"))
    return numpy_helper.to_array(proto)
