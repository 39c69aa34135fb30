"""QDQ programs to integer kernels: the rules in order, and the passes of the `qdq` phase."""

from __future__ import annotations

from typing import Any

from tvmx.passes.qdq import integer, move, requantize
from tvmx.passes.qdq.finish import finish_dequantize
from tvmx.passes.rewrite import RewriteRule, rewrite_pass
from tvmx.target import Target


def rules(target: Target) -> tuple[RewriteRule, ...]:
    """All rules, in the order in which they are tried at one call."""
    preferred = "int8" if target.arch == "aarch64" or target.kind == "cuda" else "uint8"
    sign = RewriteRule("same_sign", ("quantize",), move.same_sign(preferred))
    return (*move.RULES, sign, *integer.RULES, *requantize.RULES)


def qdq_passes(target: Target) -> list[Any]:
    """The passes of the phase."""
    return [rewrite_pass("tvmx.Qdq", rules(target)), finish_dequantize()]
