"""TVM's schedule traces as JSON: replayed, compared, and taken apart into instructions and decisions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

Decision = Any  # list[int] of a perfect tile, int of a categorical or a compute location, None: draw one
Decisions = tuple[Decision, ...]


def trace_json(trace: Any) -> Any:
    """`[instructions, decisions]` of plain Python values. (TVM's `as_json` may leave IntImm in it.)"""
    return _plain_json(trace.as_json())


def replay(func: Any, trace: Any) -> Any:
    """Apply a trace (JSON) to an unscheduled PrimFunc. Raises RuntimeError if it does not fit."""
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    sch = Schedule(tvm.IRModule({"main": func}), debug_mask="none")
    Trace.apply_json_to_schedule(trace, sch)
    return sch.mod["main"]


def decisions_of(trace: Any) -> Decisions:
    """What a trace's sampling instructions decided, in order."""
    return tuple(plain(trace.get_decision(i)) for i in trace.insts if i.kind.name.startswith("Sample"))


def plain(decision: Any) -> Decision:
    """A decision as JSON knows it."""
    if decision is None or isinstance(decision, int):
        return decision
    if hasattr(decision, "value"):
        return int(decision.value)
    return [int(v) for v in decision]


def skeleton(trace: Any) -> str:
    """Identity of a trace (JSON) apart from its decisions and postprocessing."""
    insts = []
    for inst in trace[0]:
        if inst[0] == "EnterPostproc":
            break
        insts.append(inst)
    return hashlib.sha256(json.dumps(insts, sort_keys=True).encode()).hexdigest()[:16]


def key_of(skeleton_hash: str, decisions: Sequence[Decision]) -> str:
    """Identity of a candidate."""
    return f"{skeleton_hash}:{json.dumps(list(decisions), separators=(',', ':'))}"


def _plain_json(obj: Any) -> Any:
    if isinstance(obj, list):
        return [_plain_json(v) for v in obj]
    if isinstance(obj, dict):
        return {k: _plain_json(v) for k, v in obj.items()}
    return obj.value if hasattr(obj, "value") else obj
