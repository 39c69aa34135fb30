"""QDQ programs to integer kernels: the rules in order, and the passes of the `qdq` phase."""

from __future__ import annotations

from typing import Any

from tvmx.passes.qdq import dynamic, gather, integer, move, requantize, weight_only
from tvmx.passes.qdq.finish import finish_dequantize
from tvmx.passes.qdq.report import account, write_report
from tvmx.passes.qdq.table import tabulate
from tvmx.passes.rewrite import Events, RewriteRule, rewrite_pass
from tvmx.target import Target


def rules(target: Target) -> tuple[RewriteRule, ...]:
    """All rules, in the order in which they are tried at one call."""
    products = (*integer.rules(target), *dynamic.rules(target), *weight_only.RULES)
    return (*move.RULES, *gather.RULES, *_signs(target), *products, *requantize.RULES)


def _signs(target: Target) -> tuple[RewriteRule, ...]:
    preferred = "int8" if target.arch == "aarch64" or target.kind == "cuda" else "uint8"
    return (RewriteRule("same_sign", ("quantize",), move.same_sign(preferred)),)


def qdq_passes(target: Target) -> list[Any]:
    """The passes of the phase."""
    return [_rewrite(target), finish_dequantize()]


def _rewrite(target: Target) -> Any:
    """The rules, their account attached to each function."""
    import tvm
    from tvm import relax

    def run(mod: Any, _: Any) -> Any:
        events: Events = {}
        signs = (*(r for r in move.RULES if r.name == "unshift"), *_signs(target))
        after = rewrite_pass("tvmx.Signs", signs, events)(mod)
        after = tabulate(target, events)(after)
        after = rewrite_pass("tvmx.Qdq", rules(target), events)(after)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                after[gv] = write_report(after[gv], account(func, events))
        return after

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.Qdq")
