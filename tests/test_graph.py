"""Extraction of straight-line programs from lowered Relax modules."""

from __future__ import annotations

import numpy as np
import pytest

from tests.executor.programs import graph_of, lowered
from tvmx.graph import COPY, NotStraightLine


def _relax():
    from tvm import relax

    return relax


def test_views_are_aliases_and_outputs_keep_their_names():
    relax = _relax()

    def body(b, x):
        y = b.emit(relax.op.nn.relu(x))
        z = b.emit(relax.op.reshape(y, (2, 32)))
        return b.emit(relax.op.nn.softmax(z))

    graph = graph_of(lowered([("x", (4, 16), "float32")], body), ["probabilities"])
    assert graph.inputs == ("x",)
    assert graph.outputs == ("probabilities",)
    views = [t for t in graph.tensors.values() if t.alias_of]
    assert [v.shape for v in views] == [(2, 32)]
    assert graph.storage(views[0].name) == graph.nodes[0].outputs[0]
    assert [n.op for n in graph.nodes] == ["relu", "softmax"]


def test_a_reshaped_output_is_computed_in_the_output_buffer():
    relax = _relax()

    def body(b, x):
        return b.emit(relax.op.reshape(b.emit(relax.op.nn.relu(x)), (64,)))

    graph = graph_of(lowered([("x", (4, 16), "float32")], body), ["y"])
    assert len(graph.nodes) == 1
    assert graph.storage(graph.nodes[0].outputs[0]) == "y"
    assert graph.tensors["y"].shape == (64,)


def test_input_constant_and_repeated_outputs_are_copied():
    relax = _relax()

    def body(b, x):
        y = b.emit(relax.op.nn.relu(x))
        return [x, relax.const(np.ones(3, "float32")), y, y]

    graph = graph_of(lowered([("x", (4, 16), "float32")], body), ["x", "c", "y", "again"])
    copies = [n for n in graph.nodes if n.kernel == COPY]
    assert len(copies) == 3
    assert graph.public_names == {"x.out": "x"}
    assert graph.outputs == ("x.out", "c", "y", "again")


def test_equal_constants_are_one():
    relax = _relax()

    def body(b, x):
        y = b.emit(relax.op.matmul(x, relax.const(np.eye(16, dtype="float32"))))
        return b.emit(relax.op.matmul(y, relax.const(np.eye(16, dtype="float32"))))

    graph = graph_of(lowered([("x", (4, 16), "float32")], body), ["y"])
    assert len(graph.constants) == 1
    assert graph.nodes[0].flops == 2 * 4 * 16 * 16


def test_symbolic_dims_become_expressions():
    relax = _relax()

    def body(b, x):
        y = b.emit(relax.op.nn.relu(x))
        return b.emit(relax.op.nn.softmax(b.emit(relax.op.reshape(y, (x.ty.shape.values[0] * 4, 4)))))

    graph = graph_of(lowered([("x", ("N", 16), "float32")], body), ["y"])
    assert graph.tensors["x"].shape == ("N", 16)
    assert graph.tensors["y"].shape == ("(N * 4)", 4)


@pytest.mark.parametrize(
    ("name", "in_place"),
    [("relu", True), ("gelu", True), ("softmax", False), ("transpose", False), ("add_broadcast", True)],
)
def test_in_place_is_read_from_the_kernel(name, in_place):
    relax = _relax()

    def body(b, x):
        y = {
            "relu": lambda: relax.op.nn.relu(x),
            "gelu": lambda: relax.op.nn.gelu(x),
            "softmax": lambda: relax.op.nn.softmax(x),
            "transpose": lambda: relax.op.permute_dims(x),
            "add_broadcast": lambda: relax.op.add(x, relax.const(np.ones((1, 16), "float32"))),
        }[name]()
        return b.emit(y)

    node = graph_of(lowered([("x", (16, 16), "float32")], body), ["y"]).nodes[0]
    assert node.inplace == (((0, 0),) if in_place else ())


def test_a_wider_output_is_not_in_place():
    relax = _relax()
    body = lambda b, x: b.emit(relax.op.astype(x, "float64"))  # noqa: E731
    assert graph_of(lowered([("x", (4, 4), "float32")], body), ["y"]).nodes[0].inplace == ()


def test_packed_calls_and_unknown_shapes_are_refused_with_a_reason():
    relax = _relax()

    def unique(b, x):
        return b.emit(relax.op.unique(x))

    with pytest.raises(NotStraightLine, match=r"unique|shape"):
        graph_of(lowered([("x", (8,), "float32")], unique), ["y"])
