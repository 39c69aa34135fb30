"""ONNX-level rewrites: operators the importer does not know become standard ones it does.

`RULES` is the whole table, in the order rules are tried on a node. Nothing here imports TVM.
"""

from __future__ import annotations

import onnx

from tvmx.frontend.rewrite import fused, integer, qoperator, quantized_lstm, recurrent
from tvmx.frontend.rewrite.engine import Report, apply_rules
from tvmx.frontend.rewrite.rule import RewriteRule

RULES: tuple[RewriteRule, ...] = (
    *recurrent.RULES,
    *quantized_lstm.RULES,
    *integer.RULES,
    *qoperator.RULES,
    *fused.RULES,
)


def rewrite_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in operators the importer knows; names of inputs and outputs survive.

    Raises ModelError naming node, operator and what to do where a rewrite needs more than it has.
    """
    return apply_rules(model, RULES)[0]


__all__ = ["RULES", "Report", "RewriteRule", "apply_rules", "rewrite_all"]
