"""Evaluate one ONNX node on constants, with onnx's own reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

# What onnx's reference implementation is trusted with: arithmetic, shapes and selection. It is wrong on others
# (BatchNormalization before opset 14 takes training statistics, Softmax before 13 knows one axis only, LSTM forgets
# lengths and direction, GlobalMaxPool loses dims). Not among them: random operators, and Q/DQ, which keep int8 weights.
FOLDABLE = frozenset(
    "Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast CastLike Ceil Clip Compress Concat Constant ConstantOfShape Cos Cosh CumSum Div Einsum Equal Erf "
    "Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gemm Greater GreaterOrEqual Identity IsInf IsNaN "
    "Less LessOrEqual Log MatMul Max Mean Min Mod Mul Neg NonZero Not OneHot Or Pad Pow Range Reciprocal ReduceL1 "
    "ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence Round "
    "Scatter ScatterElements ScatterND Shape Sigmoid Sign Sin Sinh Size Slice Split Sqrt Squeeze Sub Sum Tan "
    "Tanh Tile TopK Transpose Trilu Unique Unsqueeze Where Xor "
    "BlackmanWindow HammingWindow HannWindow MelWeightMatrix".split()
)


def _output_size(node: onnx.NodeProto, arrays: Sequence[Any]) -> int:
    """An upper bound of the elements that `node` makes, for operators that can grow their input."""
    given = [a for a in arrays if a is not None]
    largest = max((int(a.size) for a in given), default=1)
    if node.op_type == "ConstantOfShape":
        return int(np.prod(np.maximum(given[0], 0).astype(object)))
    if node.op_type == "Expand":
        return largest * int(np.prod(np.maximum(given[1], 1).astype(object)))
    if node.op_type == "Tile":
        return int(given[0].size) * int(np.prod(np.maximum(given[1], 0).astype(object)))
    if node.op_type == "Range":
        start, limit, delta = (float(np.asarray(a).reshape(-1)[0]) for a in given)
        return max(0, int((limit - start) / delta) + 1) if delta else 1 << 62
    if node.op_type in ("Pad", "Resize", "Upsample", "OneHot", "EyeLike"):
        return 1 << 62
    # Broadcasting and matrix products: the product of the two largest bounds both.
    sizes = sorted((int(a.size) for a in given), reverse=True)
    return sizes[0] * max(1, sizes[1]) if len(sizes) > 1 else largest


def evaluate(
    node: onnx.NodeProto,
    arrays: Sequence[Any],
    opsets: Mapping[str, int],
    max_output: int,
) -> list[Any] | None:
    """The node's outputs, or None when it must not or cannot be evaluated here.

    `max_output` bounds the elements of an output, so that `Expand` of a scalar stays an operator.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type not in FOLDABLE:
        return None
    if node.op_type == "Constant":
        return _constant(node)
    if _output_size(node, arrays) > max_output:
        return None
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.input[:], bare.output[:]
    bare.input.extend(f"i{k}" if a is not None else "" for k, a in enumerate(arrays))
    bare.output.extend(f"o{k}" if name else "" for k, name in enumerate(node.output))
    wanted = [name for name in bare.output if name]
    graph = helper.make_graph(
        [bare],
        "fold",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()],
        [helper.make_empty_tensor_value_info(name) for name in wanted],
    )
    imports = [helper.make_opsetid(d, v) for d, v in opsets.items() if d in ("", "ai.onnx")]
    model = helper.make_model(graph, opset_imports=imports)
    try:
        # Branches that a Where later discards may divide by zero or cast infinities.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = dict(zip(wanted, ReferenceEvaluator(model).run(None, feeds)))
    except Exception:
        # The reference implementation raises whatever numpy raises; an operator that it cannot
        # evaluate simply stays in the graph.
        return None
    values = [results.get(name) for name in bare.output]
    if any(v is not None and not isinstance(v, (np.ndarray, np.generic)) for v in values):
        return None
    return [None if v is None else np.asarray(v) for v in values]


def _constant(node: onnx.NodeProto) -> list[Any] | None:
    attr = node.attribute[0]
    if attr.name == "value":
        return [onnx.numpy_helper.to_array(attr.t)]
    dtypes = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    if attr.name not in dtypes:
        return None
    return [np.asarray(helper.get_attribute_value(attr), dtypes[attr.name])]
