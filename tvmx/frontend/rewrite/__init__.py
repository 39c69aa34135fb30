"""ONNX-level rewrites: operators the importer does not know become standard ones it does.

`RULES` is the whole table, in the order rules are tried on a node. Nothing here imports TVM.
"""

from __future__ import annotations

import onnx

from tvmx.frontend.rewrite import (
    affine,
    attention,
    control_flow,
    functions,
    fused,
    hygiene,
    integer,
    nbits,
    numeric,
    qoperator,
    quantized_lstm,
    recurrent,
    signal,
    spatial,
    subbyte,
)
from tvmx.frontend.rewrite.engine import Report, apply_rules
from tvmx.frontend.rewrite.rule import RewriteRule
from tvmx.frontend.rewrite.split import SplitIf
from tvmx.frontend.rewrite.split import split_if as _split_if

RULES: tuple[RewriteRule, ...] = (
    *control_flow.RULES,
    *recurrent.RULES,
    *quantized_lstm.RULES,
    *integer.RULES,
    *subbyte.RULES,
    *nbits.RULES,
    *qoperator.RULES,
    *fused.RULES,
    *attention.RULES,
    *functions.RULES,
    *numeric.RULES,
    *signal.RULES,
    *spatial.RULES,
    *affine.RULES,
    *hygiene.RULES,
)

# Operators that never survive a rewrite.
CLAIMED = frozenset(op for rule in RULES if rule.required for op in rule.ops)


def rewrite_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in operators the importer knows; names of inputs and outputs survive.

    Raises ModelError naming node, operator and what to do where a rewrite needs more than it has.
    """
    rewritten, _ = apply_rules(model, RULES)
    hygiene.merge_initializers(rewritten)
    return rewritten


def split_if(model: onnx.ModelProto) -> SplitIf | None:
    """Two programs for a model with an If on a run-time condition that cannot become a Where.

    None when there is no such If; then `rewrite_all` does. The programs hold no unrewritten
    operator but further Ifs: call `split_if` on each, then `rewrite_all`.
    """
    return _split_if(model, RULES)


__all__ = ["CLAIMED", "RULES", "Report", "RewriteRule", "SplitIf", "apply_rules", "rewrite_all", "split_if"]
