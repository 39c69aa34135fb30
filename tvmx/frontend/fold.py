"""Constant and shape folding with onnxscript, kept from undoing quantised weights."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes import common as passes
from onnxscript import optimizer

from tvmx.frontend.rewrite.evaluate import FOLDABLE

log = logging.getLogger(__name__)

# Elements of what one folded node may read and write. Large weights are folded by the Relax
# passes, which see types; here the aim is shape arithmetic.
INPUT_LIMIT = 64 * 1024
OUTPUT_LIMIT = 256 * 1024

_FILLS = {"ConstantOfShape", "EyeLike"}  # smaller as operators
_INT8 = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4)


def _should_fold(node: ir.Node) -> bool | None:
    if node.domain in ("", "ai.onnx") and (node.op_type not in FOLDABLE or node.op_type in _FILLS):
        return False
    if node.op_type in ("Cast", "CastLike") and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        # Weight-only int8: Cast(int8) * scale. Scalars and small tables may fold.
        if value.dtype in _INT8 and value.const_value is not None and value.const_value.size > 256:
            return False
    return None


def fold(model: ModelProto, name: str) -> ModelProto:
    """Fold shape arithmetic and small constants, drop dead nodes. Input and output names are kept.

    A model the folder cannot digest is returned as it is: conversion folds what it needs by itself.
    """
    try:
        graph = ir.serde.deserialize_model(model)
        # A branch that a Where discards may take the logarithm of 0, and no constant of the model is the user's fault.
        with np.errstate(all="ignore"):
            optimizer.fold_constants_ir(
                graph,
                onnx_shape_inference=True,
                input_size_limit=INPUT_LIMIT,
                output_size_limit=OUTPUT_LIMIT,
                should_fold=_should_fold,
            )
        passes.RemoveUnusedNodesPass()(graph)
        folded = ir.serde.serialize_model(graph)
    except Exception as err:  # the folder evaluates arbitrary nodes; it may fail in any way
        log.info("%s: constant folding skipped: %s", name, err)
        return model
    if _names(folded) != _names(model):
        log.info("%s: constant folding changed the signature; unfolded model used", name)
        return model
    return folded


def _names(model: ModelProto) -> tuple[list[str], list[str]]:
    return [i.name for i in model.graph.input], [o.name for o in model.graph.output]
