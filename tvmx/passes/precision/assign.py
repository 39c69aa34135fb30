"""The pass: rules that travel with the module → plan → casts. Without rules no float32 operator changes."""

from __future__ import annotations

import json
from typing import Any

from tvmx.errors import ConfigError
from tvmx.passes.precision.accumulate import accumulate_wide
from tvmx.passes.precision.cast import cast_program
from tvmx.passes.precision.dequantize import strip_quantization
from tvmx.passes.precision.operators import list_operators
from tvmx.precision.files import rules_from_table, rules_table
from tvmx.precision.plan import PrecisionPlan
from tvmx.precision.resolve import resolve
from tvmx.precision.rules import PrecisionRules
from tvmx.target import Target

RULES_ATTR = "tvmx.precision_rules"  # module attribute: JSON of the rules
PLAN_ATTR = "tvmx.precision"  # module attribute: JSON of the plan that was applied


def with_rules(mod: Any, rules: PrecisionRules, also_known: tuple[str, ...] = ()) -> Any:
    """The module with rules for `assign_precision`. `also_known`: names of operators of other programs."""
    return mod.with_attr(RULES_ATTR, json.dumps({"rules": rules_table(rules), "also_known": also_known}))


def plan_of(mod: Any) -> PrecisionPlan | None:
    """The plan that was applied to a module, if any."""
    text = mod.attrs[PLAN_ATTR] if mod.attrs and PLAN_ATTR in mod.attrs else None
    return None if text is None else PrecisionPlan.from_json(json.loads(text))


def assign_precision(target: Target) -> Any:
    """The pass. Raises ConfigError for rules that do not fit the program."""
    import tvm
    import tvm_ffi
    from tvm import relax

    tvm_ffi.register_error(ConfigError)  # else it leaves the pass as a RuntimeError
    tidy = tvm.transform.Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])

    def run(mod: Any, _: Any) -> Any:
        if not mod.attrs or RULES_ATTR not in mod.attrs:
            return accumulate_wide(mod)
        request = json.loads(mod.attrs[RULES_ATTR])
        rules = rules_from_table(request["rules"])
        listed = list_operators(mod)
        plan = resolve(rules, [op for _, op in listed], target, request["also_known"])
        floating = {var for (var, op), e in zip(listed, plan.entries) if op.quantized and e.precision != "int8"}
        if floating:
            mod = strip_quantization(mod, floating)
        if not plan.is_identity:
            entries = {var: e for (var, _), e in zip(listed, plan.entries)}
            mod = cast_program(mod, entries, plan.io)
        mod = accumulate_wide(mod)
        if not plan.is_identity:
            mod = tidy(mod)
        return mod.with_attr(PLAN_ATTR, json.dumps(plan.to_json()))

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.AssignPrecision")
