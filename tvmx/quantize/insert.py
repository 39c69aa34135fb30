"""Writes the QDQ model: QuantizeLinear and DequantizeLinear around the layers, int8 weights, int32 biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmx.frontend.rewrite.context import rename_uses, used_names
from tvmx.quantize.graph import Array, OnnxGraph
from tvmx.quantize.moments import Moments
from tvmx.quantize.placement import Layer, Placement, WeightOnly
from tvmx.quantize.qparams import (
    QParams,
    QWeight,
    bias_floor,
    quantize_bias,
    quantize_weight,
)
from tvmx.quantize.rounding import mean_error, round_to_data


@dataclass(frozen=True)
class Inserted:
    """The QDQ model, and per layer its quantised weight (for reports)."""

    model: ModelProto
    weights: dict[tuple[str, int | None], QWeight]


def insert_qdq(
    graph: OnnxGraph,
    placement: Placement,
    qparams: Mapping[str, QParams],
    weight_limit: int = 127,
    biases: Mapping[str, Array] | None = None,
    moments: Mapping[str, Moments] | None = None,
) -> Inserted:
    """The model in QDQ form. `qparams`: parameters of each of `placement.roots`.

    `biases` (layer name → float bias) replace those of the model, as bias correction wants. With `moments` (layer
    name → what it reads) weights are rounded by them, and the mean error that is left goes into the bias.
    """
    return _Writer(graph, placement, qparams, weight_limit, biases or {}, moments or {}).run()


class _Writer:
    def __init__(
        self,
        graph: OnnxGraph,
        placement: Placement,
        qparams: Mapping[str, QParams],
        weight_limit: int,
        biases: Mapping[str, Array],
        moments: Mapping[str, Moments],
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.qparams = qparams
        self.limit = weight_limit
        self.biases = biases
        self.moments = moments
        self.names = {*graph.initializers, *graph.producer, *graph.inputs, *(n.name for n in graph.nodes)}
        self.nodes = [_copy(n) for n in graph.nodes]
        self.before: dict[int, list[NodeProto]] = {}  # nodes to write ahead of a node
        self.after: dict[int, list[NodeProto]] = {}  # and behind it; -1: at the very start
        self.tensors: list[TensorProto] = []
        self.weights: dict[tuple[str, int | None], QWeight] = {}
        self._written: dict[tuple[str, int | None], str] = {}
        self._params: dict[str, tuple[str, str]] = {}
        self._zero_points: dict[tuple[tuple[int, ...], str], str] = {}

    def run(self) -> Inserted:
        dequantized = {name: self._activation(name) for name in self.placement.tensors}
        for layer in self.placement.layers:
            node = self.nodes[layer.node]
            for position in layer.activations:
                node.input[position] = dequantized[self.graph.nodes[layer.node].input[position]]
        parts: list[Layer | WeightOnly] = [*self.placement.layers, *self.placement.weight_only]
        for part in parts:
            if part.weight is not None and part.op != "Gather":
                self._prepare_weight(part)
        for layer in self.placement.layers:
            if layer.weight is not None:
                self.nodes[layer.node].input[layer.weight] = self._weight(layer)
            if layer.bias is not None:
                self._bias(layer)
        for table in self.placement.weight_only:
            if table.op == "Gather":
                self._table(table)
            else:
                self.nodes[table.node].input[table.weight] = self._weight(table)
        self._outputs(dequantized)
        return Inserted(self._model(), self.weights)

    # activations

    def _activation(self, name: str) -> str:
        """Q and DQ behind the tensor's maker; returns the dequantised name."""
        scale, zero = self._parameters(self.placement.tensors[name])
        quantized = self._fresh(f"{name}_quantized")
        result = self._fresh(f"{name}_dequantized")
        where = self.after.setdefault(self.graph.producer.get(name, -1), [])
        where.append(self._node("QuantizeLinear", [name, scale, zero], quantized))
        where.append(self._node("DequantizeLinear", [quantized, scale, zero], result))
        return result

    def _parameters(self, root: str) -> tuple[str, str]:
        if root not in self._params:
            params = self.qparams[root]
            scale = self._constant(np.float32(params.scale), f"{root}_scale")
            zero = self._constant(np.array(params.zero_point, params.dtype), f"{root}_zero_point")
            self._params[root] = scale, zero
        return self._params[root]

    def _outputs(self, dequantized: Mapping[str, str]) -> None:
        """An output that is quantised for its own sake: the dequantised tensor takes over the output's name."""
        for name in self._output_tensors():
            raw = self._fresh(f"{name}_float")
            index = self.graph.producer[name]
            maker = self.nodes[index]
            maker.output[:] = [raw if out == name else out for out in maker.output]
            for pair in self.after[index]:
                rename_uses(pair, {name: raw})
                pair.output[:] = [name if out == dequantized[name] else out for out in pair.output]

    def _output_tensors(self) -> list[str]:
        read = {self.graph.nodes[la.node].input[i] for la in self.placement.layers for i in la.activations}
        return [n for n in self.placement.tensors if n in self.graph.outputs and n not in read]

    # constants

    def _prepare_weight(self, part: Layer | WeightOnly) -> None:
        """Quantise a weight once, with the scales that every layer sharing it can live with."""
        assert part.weight is not None
        name = self.graph.nodes[part.node].input[part.weight]
        key = (name, part.weight_axis)
        if key in self.weights:
            return
        value = self.graph.constant(name)
        assert value is not None
        floor = self._floor(key)
        weight = quantize_weight(value, part.weight_axis, self.limit, floor)
        moments = self._moments(part, name)
        if moments is not None:
            weight = round_to_data(value, weight, self.limit, moments, getattr(part, "bias", None) is not None)
        self.weights[key] = weight

    def _moments(self, part: Layer | WeightOnly, weight: str) -> Moments | None:
        """What the layer reads, unless others read its weight too and other things with it."""
        return self.moments.get(part.name) if len(self.graph.consumers[weight]) == 1 else None

    def _floor(self, key: tuple[str, int | None]) -> Array | None:
        floors = []
        for layer in self.placement.layers:
            if layer.bias is None or layer.weight is None:
                continue
            node = self.graph.nodes[layer.node]
            if (node.input[layer.weight], layer.weight_axis) == key:
                floors.append(bias_floor(self._bias_value(layer), self._input_scale(layer)))
        if not floors:
            return None
        floor = np.max(floors, axis=0)
        return np.asarray(floor if key[1] is not None else floor.max(keepdims=True), np.float32)

    def _input_scale(self, layer: Layer) -> float:
        name = self.graph.nodes[layer.node].input[layer.activations[0]]
        return self.qparams[self.placement.tensors[name]].scale

    def _bias_value(self, layer: Layer) -> Array:
        if layer.name in self.biases:
            return self.biases[layer.name]
        assert layer.bias is not None
        value = self.graph.constant(self.graph.nodes[layer.node].input[layer.bias])
        assert value is not None
        return value

    def _weight(self, part: Layer | WeightOnly) -> str:
        """The dequantised weight's name; written once however many layers read it."""
        assert part.weight is not None
        name = self.graph.nodes[part.node].input[part.weight]
        key = (name, part.weight_axis)
        if key not in self._written:
            weight = self.weights[key]
            inputs = [
                self._constant(weight.values, f"{name}_quantized"),
                self._constant(weight.scale, f"{name}_scale"),
                self._zeros(weight.scale.shape, np.int8),
            ]
            result = self._fresh(f"{name}_dequantized")
            node = self._node("DequantizeLinear", inputs, result, axis=weight.axis)
            self.after.setdefault(-1, []).append(node)
            self._written[key] = result
        return self._written[key]

    def _bias(self, layer: Layer) -> None:
        assert layer.bias is not None
        assert layer.weight is not None
        node = self.graph.nodes[layer.node]
        weight = self.weights[(node.input[layer.weight], layer.weight_axis)]
        bias = self._bias_value(layer)
        moments = self._moments(layer, node.input[layer.weight])
        if moments is not None and layer.name not in self.biases:
            value = self.graph.constant(node.input[layer.weight])
            assert value is not None
            bias = bias - mean_error(value, weight, moments)
        values, scale = quantize_bias(bias, self._input_scale(layer), weight.scale)
        name = f"{layer.name}_bias"
        inputs = [
            self._constant(values, f"{name}_quantized"),
            self._constant(scale, f"{name}_scale"),
            self._zeros(scale.shape, np.int32),
        ]
        result = self._fresh(f"{name}_dequantized")
        self.after.setdefault(-1, []).append(self._node("DequantizeLinear", inputs, result, axis=0))
        self.nodes[layer.node].input[layer.bias] = result

    def _table(self, table: WeightOnly) -> None:
        """gather(table, i) → cast(gather(int8 table, i)) * gather(row scales, i): only the rows read are converted."""
        node = self.nodes[table.node]
        name, indices, output = node.input[0], node.input[1], node.output[0]
        key = (name, 0)
        if key not in self.weights:
            value = self.graph.constant(name)
            assert value is not None
            self.weights[key] = quantize_weight(value, 0)
        weight = self.weights[key]
        if key not in self._written:
            self._written[key] = self._constant(weight.values, f"{name}_quantized")
            self._params[name] = self._constant(weight.scale.reshape(-1, 1), f"{name}_scale"), ""
        rows, values, scales = (self._fresh(f"{output}_{part}") for part in ("quantized", "values", "scale"))
        scale = self._params[name][0]
        node.input[0], node.output[0] = self._written[key], rows
        self.after.setdefault(table.node, [])[:0] = [
            self._node("Cast", [rows], values, to=TensorProto.FLOAT),
            self._node("Gather", [scale, indices], scales, axis=0),
            self._node("Mul", [values, scales], output),
        ]

    # parts

    def _fresh(self, hint: str) -> str:
        name, k = hint, 1
        while name in self.names:
            k += 1
            name = f"{hint}_{k}"
        self.names.add(name)
        return name

    def _constant(self, value: Array | np.float32, hint: str) -> str:
        name = self._fresh(hint)
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _zeros(self, shape: tuple[int, ...], dtype: type[np.signedinteger[Any]]) -> str:
        """Zero points, written once for all that have as many: in small models they would be a percent of the size.

        They could be left out, but other runtimes fuse less then.
        """
        key = shape, np.dtype(dtype).name
        if key not in self._zero_points:
            hint = "_".join(["zero_points", key[1], *map(str, shape)])
            self._zero_points[key] = self._constant(np.zeros(shape, dtype), hint)
        return self._zero_points[key]

    def _node(self, op: str, inputs: list[str], output: str, **attributes: int | None) -> NodeProto:
        given = {k: v for k, v in attributes.items() if v is not None}
        return helper.make_node(op, inputs, [output], self._fresh(f"{output}_{op}"), **given)

    def _model(self) -> ModelProto:
        nodes = list(self.after.get(-1, ()))
        for index, node in enumerate(self.nodes):
            nodes.append(node)
            nodes.extend(self.after.get(index, ()))
        model = ModelProto()
        model.CopyFrom(self.graph.proto)
        del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
        model.graph.node.extend(nodes)
        used = {name for node in nodes for name in used_names(node)} | {o.name for o in model.graph.output}
        model.graph.initializer.extend(t for t in self.graph.initializers.values() if t.name in used)
        model.graph.initializer.extend(t for t in self.tensors if t.name in used)
        model.producer_name = "tvmx.quantize"
        return model


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy
