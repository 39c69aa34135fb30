"""One program that holds every layer twice, in float and as quantised, and chooses by an input.

With it, the effect of each layer on the outputs is measured by running, not by compiling, again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmx.quantize.graph import Array, OnnxGraph
from tvmx.quantize.insert import Inserted
from tvmx.quantize.placement import SAME_SCALE, Layer, Placement

FLAGS = "tvmx_quantized_layers"  # bool [layers]: whether each is quantised


def switchable(placement: Placement) -> tuple[Layer, ...]:
    """The layers that round anything: what hands elements on unchanged reads what is rounded already."""
    return tuple(la for la in placement.layers if la.op not in SAME_SCALE or la.op in ("Concat", "Resize"))


def switched_model(graph: OnnxGraph, placement: Placement, inserted: Inserted, show: bool = False) -> ModelProto:
    """The float model with the input FLAGS; `inserted` is its QDQ form.

    Each layer y = f(x, w) becomes y = Where(flag, f(DQ(Q(x)), DQ(w)), f(x, w)). With `show`, the results of all
    layers are further outputs.
    """
    quantized = {n.name: n for n in inserted.model.graph.node}
    makers = {o: n for n in inserted.model.graph.node for o in n.output}
    layers = {la.node: k for k, la in enumerate(switchable(placement))}
    model = ModelProto()
    model.CopyFrom(inserted.model)
    known = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(t for t in graph.initializers.values() if t.name not in known)
    nodes: list[NodeProto] = []
    written: set[str] = set()

    def add(node: NodeProto) -> None:
        if node.output[0] not in written:
            written.update(node.output)
            nodes.append(node)

    def chain(name: str) -> None:
        """The Q and DQ that make a tensor, ahead of the first who reads it."""
        maker = makers.get(name)
        if maker is not None and maker.op_type in ("QuantizeLinear", "DequantizeLinear"):
            chain(maker.input[0])
            add(maker)

    for index, node in enumerate(graph.nodes):
        if index not in layers:
            add(node)
            continue
        twin = quantized[node.name]
        for name in twin.input:
            chain(name)
        position, output = layers[index], node.output[0]
        flag, as_float, as_int = (f"{output}_{part}" for part in ("tvmx_flag", "tvmx_float", "tvmx_int"))
        which = f"{output}_tvmx_index"
        model.graph.initializer.append(numpy_helper.from_array(np.array(position, np.int64), which))
        add(helper.make_node("Gather", [FLAGS, which], [flag], f"{flag}_Gather", axis=0))
        add(_renamed(node, as_float))
        add(_renamed(twin, as_int))
        add(helper.make_node("Where", [flag, as_int, as_float], [output], f"{output}_tvmx_Where"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.input.append(helper.make_tensor_value_info(FLAGS, TensorProto.BOOL, (len(layers),)))
    if show:
        present = {o.name for o in model.graph.output}
        for index in layers:
            name = graph.nodes[index].output[0]
            if name not in present:
                info = helper.make_tensor_value_info(name, TensorProto.FLOAT, graph.shape(name) or ())
                model.graph.output.append(info)
    return model


def _renamed(node: NodeProto, output: str) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{output}_{node.op_type}"
    copy.output[:] = [output]
    return copy


def flags_for(placement: Placement, in_float: Mapping[str, object] | set[str]) -> Array:
    """The FLAGS input: every layer quantised but those named."""
    return np.array([la.name not in in_float for la in switchable(placement)])
