"""What a quantised model means, without any kernel's own rounding: the reference of `benchmarks.quantized_import`.

Every QOperator node is written out as DequantizeLinear → float operator → QuantizeLinear, every integer product as a
product of exact numbers, and ONNX Runtime runs the result with its graph optimisations off, so that nothing is fused.
(Its own integer kernels are no reference: they requantise in fixed point, drop Q/DQ pairs, look sigmoids up in tables,
and saturate 16-bit pairs on x86 without VNNI.)

`nudged` is the same model with every scale moved by two or three float32 steps. How far its outputs are from the exact
ones is how far rounding alone can carry a value: a code that lay between two steps falls to the other side, and the
layers behind it see that. No implementation with float32 scales can be asked to come closer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

NUDGE = 3e-7

Array = np.ndarray[Any, Any]


class _Writer:
    """The written-out nodes of one model, and what is known of its values."""

    def __init__(self, model: ModelProto) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers = {i.name: i for i in model.graph.initializer}
        self.shapes = {v.name: len(v.type.tensor_type.shape.dim) for v in _typed(model)}
        self.count = 0

    def op(self, op: str, *inputs: str, **attrs: Any) -> str:
        self.count += 1
        out = f"exact_{self.count}_{op}"
        kept = {k: v for k, v in attrs.items() if v is not None}
        self.nodes.append(helper.make_node(op, list(inputs), [out], **kept))
        return out

    def value(self, name: str) -> Array | None:
        return numpy_helper.to_array(self.initializers[name]) if name in self.initializers else None

    def constant(self, array: Any) -> str:
        self.count += 1
        name = f"exact_{self.count}_constant"
        self.initializers[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def dequantize(self, x: str, scale: str, zero: str, axis: int) -> str:
        """(x - zero) · scale; vectors run along `axis`."""
        return self.op("DequantizeLinear", x, self.one_shape(scale), self.one_shape(zero), axis=axis)

    def one_shape(self, name: str) -> str:
        """A parameter of one element as a scalar."""
        value = self.value(name) if name else None
        return self.constant(value.reshape(())) if value is not None and value.size == 1 else name

    def quantize_to(self, out: str, y: str, scale: str, zero: str) -> None:
        node = helper.make_node("QuantizeLinear", [y, self.one_shape(scale), self.one_shape(zero)], [out])
        self.nodes.append(node)


def _typed(model: ModelProto) -> list[Any]:
    return [*model.graph.value_info, *model.graph.input, *model.graph.output]


def _attrs(node: NodeProto, *names: str) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name in names}


_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _qlinear_conv(w: _Writer, node: NodeProto) -> None:
    i = node.input
    x = w.dequantize(i[0], i[1], i[2], 1)
    weight = w.dequantize(i[3], i[4], i[5], 0)
    inputs = [x, weight]
    if len(i) > 8 and i[8]:
        scale = w.op("Mul", i[1], i[4])
        inputs.append(w.op("Mul", w.op("Cast", i[8], to=TensorProto.FLOAT), scale))
    w.quantize_to(node.output[0], w.op("Conv", *inputs, **_attrs(node, *_CONV)), i[6], i[7])


def _qlinear_matmul(w: _Writer, node: NodeProto) -> None:
    i = node.input
    b = w.value(i[3])
    axis = b.ndim - 1 if b is not None else w.shapes.get(i[3], 2) - 1
    y = w.op("MatMul", w.dequantize(i[0], i[1], i[2], 0), w.dequantize(i[3], i[4], i[5], axis))
    w.quantize_to(node.output[0], y, i[6], i[7])


def _qgemm(w: _Writer, node: NodeProto) -> None:
    i = node.input
    trans = _attrs(node, "transA", "transB", "alpha")
    a, b = w.dequantize(i[0], i[1], i[2], 0), w.dequantize(i[3], i[4], i[5], 0 if trans.get("transB") else 1)
    inputs = [a, b]
    if i[6]:
        scale = w.op("Mul", w.op("Mul", i[1], i[4]), w.constant(np.float32(trans.get("alpha", 1.0))))
        inputs.append(w.op("Mul", w.op("Cast", i[6], to=TensorProto.FLOAT), scale))
    y = w.op("Gemm", *inputs, **trans)
    if len(i) > 7 and i[7]:
        w.quantize_to(node.output[0], y, i[7], i[8])
    else:
        w.nodes.append(helper.make_node("Identity", [y], [node.output[0]]))


def _elementwise(op: str) -> Callable[[_Writer, NodeProto], None]:
    def write(w: _Writer, node: NodeProto) -> None:
        i = node.input
        y = w.op(op, w.dequantize(i[0], i[1], i[2], 0), w.dequantize(i[3], i[4], i[5], 0))
        w.quantize_to(node.output[0], y, i[6], i[7])

    return write


def _unary(op: str, *attrs: str) -> Callable[[_Writer, NodeProto], None]:
    def write(w: _Writer, node: NodeProto) -> None:
        i = node.input
        given = _attrs(node, *attrs)
        y = w.op(op, w.dequantize(i[0], i[1], i[2], 0), **given)
        w.quantize_to(node.output[0], y, i[3], i[4])

    return write


def _concat(w: _Writer, node: NodeProto) -> None:
    i = node.input
    parts = [w.dequantize(*i[k : k + 3], 0) for k in range(2, len(i), 3)]
    w.quantize_to(node.output[0], w.op("Concat", *parts, **_attrs(node, "axis")), i[0], i[1])


def _where(w: _Writer, node: NodeProto) -> None:
    i = node.input
    y = w.op("Where", i[0], w.dequantize(i[1], i[2], i[3], 0), w.dequantize(i[4], i[5], i[6], 0))
    w.quantize_to(node.output[0], y, i[7], i[8])


def _matmul_integer(w: _Writer, node: NodeProto) -> None:
    """In doubles, which hold every sum of 8-bit products."""
    i = list(node.input) + [""] * (4 - len(node.input))
    b = w.value(i[1])
    wide = []
    for name, zero, column in ((i[0], i[2], True), (i[1], i[3], False)):
        value = w.op("Cast", name, to=TensorProto.DOUBLE)
        if zero:
            known = w.value(zero)
            offset = w.op("Cast", w.one_shape(zero), to=TensorProto.DOUBLE)
            if known is not None and known.size > 1:
                offset = w.op("Reshape", offset, w.constant(np.array([-1, 1] if column else [1, -1], np.int64)))
            value = w.op("Sub", value, offset)
        wide.append(value)
    assert b is None or b.ndim >= 1
    y = w.op("MatMul", *wide)
    w.nodes.append(helper.make_node("Cast", [y], [node.output[0]], to=TensorProto.INT32))


def _conv_integer(w: _Writer, node: NodeProto) -> None:
    """In float32: sums beyond 2^24 lose their last bits, 6e-8 of their size."""
    i = list(node.input) + [""] * (4 - len(node.input))
    one = w.constant(np.float32(1))
    x = w.op("DequantizeLinear", i[0], one, w.one_shape(i[2]))
    zero = w.value(i[3]) if i[3] else None
    if zero is not None and zero.size > 1:
        weight = w.op("DequantizeLinear", i[1], w.constant(np.ones(zero.size, np.float32)), i[3], axis=0)
    else:
        weight = w.op("DequantizeLinear", i[1], one, w.one_shape(i[3]))
    y = w.op("Conv", x, weight, **_attrs(node, *_CONV))
    w.nodes.append(helper.make_node("Cast", [y], [node.output[0]], to=TensorProto.INT32))


WRITTEN: dict[str, Callable[[_Writer, NodeProto], None]] = {
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QGemm": _qgemm,
    "QLinearAdd": _elementwise("Add"),
    "QLinearMul": _elementwise("Mul"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearLeakyRelu": _unary("LeakyRelu", "alpha"),
    "QLinearSoftmax": _unary("Softmax", "axis"),
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearAveragePool": _unary("AveragePool", "auto_pad", "ceil_mode", "count_include_pad", *_CONV),
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
}


def exact_model(model: ModelProto) -> ModelProto:
    """The model with every quantised operator written out. Operators not in `WRITTEN` stay."""
    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception:  # shapes are a help only
        pass
    writer = _Writer(model)
    for node in model.graph.node:
        write = WRITTEN.get(node.op_type)
        if write is None:
            writer.nodes.append(node)
        else:
            write(writer, node)
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:], result.graph.initializer[:], result.graph.value_info[:]
    result.graph.node.extend(writer.nodes)
    result.graph.initializer.extend(writer.initializers.values())
    return result


def nudged(model: ModelProto, seed: int = 0) -> ModelProto:
    """The model with every Q/DQ scale moved by up to NUDGE of itself."""
    rng = np.random.default_rng(seed)
    result = ModelProto()
    result.CopyFrom(model)
    scales = {
        n.input[1] for n in result.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear") if n.input[1]
    }
    # ONNX Runtime's quantize_dynamic multiplies by the scale of a weight under this name.
    scales |= {i.name for i in result.graph.initializer if i.name.endswith("_scale")}
    for tensor in result.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.name in scales and value.dtype == np.float32:
            moved = np.asarray(value * (1 + NUDGE * rng.uniform(-1, 1, value.shape)))
            tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    return result


def run_plain(model: ModelProto, feed: Mapping[str, Array], outputs: list[str] | None = None) -> dict[str, Array]:
    """Outputs by name, from ONNX Runtime with every graph optimisation off."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = outputs or [o.name for o in session.get_outputs()]
    known = {i.name for i in session.get_inputs()}
    return dict(zip(wanted, session.run(wanted, {k: v for k, v in feed.items() if k in known}), strict=True))


def cut_at_codes(exact: ModelProto, feed: Mapping[str, Array]) -> tuple[ModelProto, dict[str, Array], dict[str, Array]]:
    """(model, inputs, outputs): every operator between two sets of codes on its own, with the exact codes as its input.

    Codes that a DequantizeLinear reads become inputs of the model, codes that a QuantizeLinear makes become outputs, so
    that a step too much in one operator is seen there and not what a whole network makes of it.
    """
    nodes = list(exact.graph.node)
    constant = {i.name for i in exact.graph.initializer}
    made = [n.output[0] for n in nodes if n.op_type == "QuantizeLinear" and n.input[0] not in constant]
    read = [n.input[0] for n in nodes if n.op_type == "DequantizeLinear" and n.input[0] not in constant]
    names = list(dict.fromkeys([*made, *read]))
    shown = _with_outputs(exact, names)
    values = run_plain(shown, feed, [*names, *(o.name for o in exact.graph.output)])
    cut = ModelProto()
    cut.CopyFrom(exact)
    fed = {name: f"fed_{k}" for k, name in enumerate(dict.fromkeys(read))}
    for node in cut.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in fed:
            node.input[0] = fed[node.input[0]]
    for name, new in fed.items():
        value = values[name]
        elem = helper.np_dtype_to_tensor_dtype(value.dtype)
        cut.graph.input.append(helper.make_tensor_value_info(new, elem, value.shape))
    del cut.graph.output[:]
    wanted = list(dict.fromkeys([*made, *(o.name for o in exact.graph.output)]))
    for name in wanted:
        elem = helper.np_dtype_to_tensor_dtype(values[name].dtype)
        cut.graph.output.append(helper.make_tensor_value_info(name, elem, values[name].shape))
    _drop_dead(cut)
    feeds = {**feed, **{new: values[name] for name, new in fed.items()}}
    known = {i.name for i in cut.graph.input}
    return cut, {k: v for k, v in feeds.items() if k in known}, {name: values[name] for name in wanted}


def _with_outputs(model: ModelProto, names: list[str]) -> ModelProto:
    shown = ModelProto()
    shown.CopyFrom(model)
    there = {o.name for o in shown.graph.output}
    shown.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names if n not in there)
    return shown


def _drop_dead(model: ModelProto) -> None:
    """Nodes and inputs that no output needs any more, in place."""
    live = {o.name for o in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if any(o in live for o in node.output):
            live.update(node.input)
            kept.append(node)
    inputs = [i for i in model.graph.input if i.name in live]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(reversed(kept))
    model.graph.input.extend(inputs)
