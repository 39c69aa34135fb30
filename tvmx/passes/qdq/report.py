"""What became of each quantize and dequantize of a program, and why.

The phase writes its account as JSON into the attribute `tvmx.qdq` of the function it rewrote, so that it travels with
the module; `read_report` takes it out again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tvmx.passes.constants import as_array
from tvmx.passes.qdq.between import FloatTensor, floats_between
from tvmx.passes.qdq.move import PASS_THROUGH
from tvmx.passes.rewrite import Events, dims_of, dtype_of, op_name

ATTRIBUTE = "tvmx.qdq"

TABLE = "table"  # what `tvmx.passes.qdq.table` calls its event
INTEGER, EPILOGUE, CANCELLED, FOLDED, FLOAT = "integer", "fused", "cancelled", "folded", "float"
INTEGER_RULES = ("integer_conv2d", "dynamic_conv2d", "integer_transpose", "integer_matmul", "weight_only_matmul")
SUMMED = ("mean", "sum", "nn.avg_pool2d")
ELEMENTWISE = frozenset(
    """add subtract multiply divide maximum minimum negative abs sqrt rsqrt exp log tanh sigmoid erf clip power square
    where astype round floor ceil nn.relu nn.relu6 nn.leakyrelu nn.gelu nn.gelu_tanh nn.silu nn.softplus
    nn.selu greater greater_equal less less_equal equal not_equal logical_and logical_or logical_not""".split()
)


@dataclass(frozen=True)
class QdqEntry:
    """One quantize or dequantize of the program as it came."""

    kind: str  # "quantize" | "dequantize"
    name: str  # variable that it defines
    tensor: str  # "uint8 [1, 56, 56, 64]"
    place: str  # the operators around it
    outcome: str  # one of the constants above
    detail: str


@dataclass(frozen=True)
class QdqReport:
    """All entries in program order. `between` lists float tensors on the way from one integer kernel to another.

    `kept`: (name, operator, reason) of what our quantiser left in float, as the model notes it.
    """

    entries: tuple[QdqEntry, ...] = ()
    between: tuple[FloatTensor, ...] = ()
    float_kernels: tuple[str, ...] = ()
    kept: tuple[tuple[str, str, str], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(f"{e.kind} {e.outcome}" for e in self.entries))

    @property
    def remaining(self) -> tuple[QdqEntry, ...]:
        """Those that still meet a float operator."""
        return tuple(e for e in self.entries if e.outcome == FLOAT)

    @property
    def gaps(self) -> tuple[FloatTensor, ...]:
        """Float tensors between integer kernels that no operator asks for."""
        return tuple(t for t in self.between if not t.kept_by)

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "remaining": len(self.remaining),
            "float_tensors_between_integer_kernels": [asdict(t) for t in self.between],
            "gaps": len(self.gaps),
            "float_kernels": list(self.float_kernels),
            "kept_in_float": [{"name": name, "op": op, "reason": reason} for name, op, reason in self.kept],
            "entries": [asdict(e) for e in self.entries],
        }

    def __str__(self) -> str:
        if not self.entries:
            return "the model has no quantize or dequantize"
        lines = [f"{e.kind:10} {e.tensor:28} {e.place:44} {e.outcome:9} {e.detail}" for e in self.entries]
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        lines.append(f"{len(self.entries)} in all: {counts}")
        lines.append(f"{len(self.remaining)} remain at float operators")
        lines.append(f"float tensors between integer kernels: {len(self.between) or 'none'}")
        lines += [f"  {t.type:28} {t.writer} -> {', '.join(t.readers)}: {_why(t)}" for t in self.between]
        if self.kept:
            lines.append("kept in float by the quantiser:")
            lines += [f"  {op:14} {name}: {reason}" for name, op, reason in self.kept]
        return "\n".join(lines)


def _why(tensor: FloatTensor) -> str:
    return f"for {', '.join(tensor.kept_by)}" if tensor.kept_by else "NO OPERATOR ASKS FOR IT"


def account(before: Any, events: Events) -> tuple[QdqEntry, ...]:
    """Entries for a function as it was before the rules, from what the rules did."""
    program = _Program(before, events)
    return tuple(
        program.of_dequantize(var) if op_name(value) == "dequantize" else program.of_quantize(var)
        for var, value in program.definitions.items()
        if op_name(value) in ("quantize", "dequantize")
    )


class _Program:
    """Definitions and readers of a function's variables."""

    def __init__(self, func: Any, events: Events) -> None:
        from tvm import relax

        self.events = events
        self.definitions: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        for block in func.body.blocks:
            for binding in block.bindings:
                self.definitions[binding.var] = binding.value
                for arg in _arguments(binding.value):
                    if isinstance(arg, relax.Var):
                        self.readers.setdefault(arg, []).append(binding.var)

    def fired(self, var: Any) -> set[str]:
        return {rule for rule, reason in self.events.get(var.name, ()) if reason is None}

    def reasons(self, var: Any, *rules: str) -> str:
        found = [reason for rule, reason in self.events.get(var.name, ()) if reason and (not rules or rule in rules)]
        return found[-1] if found else ""

    def of_dequantize(self, var: Any) -> QdqEntry:
        call = self.definitions[var]
        readers = self.readers.get(var, [])
        fates = [self._fate(reader, 0) for reader in readers] or [(FOLDED, "nothing reads it")]
        constant = as_array(call.args[0]) is not None
        worst = min(fates, key=lambda fate: (FLOAT, FOLDED, EPILOGUE, CANCELLED, INTEGER).index(fate[0]))
        if constant and worst[0] in (FLOAT, EPILOGUE):
            worst = (FOLDED, f"a constant, kept in float: {worst[1]}")
        place = " ".join(["->", *dict.fromkeys(op_name(self.definitions[r]) or "kernel" for r in readers)])
        return QdqEntry("dequantize", var.name, _tensor(call.args[0]), place, *worst)

    def _fate(self, reader: Any, depth: int) -> tuple[str, str]:
        name = op_name(self.definitions[reader])
        fired = self.fired(reader)
        if TABLE in fired:
            return EPILOGUE, "part of one look-up of codes in a table"
        if name == "quantize":
            return (CANCELLED, "meets its quantize") if "cancel" in fired else (EPILOGUE, "requantised in one kernel")
        integer = [rule for rule in INTEGER_RULES if rule in fired]
        if integer:
            return INTEGER, f"{name} reads the codes ({integer[0]})"
        if "gather_codes" in fired:
            return INTEGER, "codes are looked up, then scaled"
        if "fold_bias" in fired:
            return INTEGER, "joins the int32 sums as bias"
        if "sink_dequantize" in fired and depth < 16:
            fates = [self._fate(r, depth + 1) for r in self.readers.get(reader, [])]
            if not fates:
                return EPILOGUE, f"moved below {name}, to the output"
            worst = min(fates, key=lambda fate: (FLOAT, FOLDED, EPILOGUE, CANCELLED, INTEGER).index(fate[0]))
            return worst[0], f"moved below {name}; {worst[1]}"
        if name in SUMMED:
            return INTEGER, f"{name} sums the codes"
        if name in ELEMENTWISE:
            return EPILOGUE, f"computed in registers with {name}"
        reason = self.reasons(reader) if name in ("nn.conv2d", "nn.conv2d_transpose", "matmul", *PASS_THROUGH) else ""
        if not name:
            return FLOAT, "an output, or an operator with no integer form"
        return FLOAT, f"{name}: {reason}" if reason else f"{name} has no integer form"

    def of_quantize(self, var: Any) -> QdqEntry:
        from tvm import relax

        call = self.definitions[var]
        fired = self.fired(var)
        source = call.args[0]
        name = op_name(self.definitions.get(source))
        place = f"{name or 'input'} ->"
        if "cancel" in fired:
            fate = (CANCELLED, "meets its dequantize")
        elif TABLE in fired:
            fate = (EPILOGUE, "part of one look-up of codes in a table")
        elif not isinstance(source, relax.Var):
            fate = (FOLDED, "quantises a constant")
        elif source not in self.definitions:
            fate = (FLOAT, "quantises an input of the model")
        else:
            fate = self._origin(source)
            if "raise_quantize" in fired:
                fate = (fate[0], f"moved above {name}; {fate[1]}")
        return QdqEntry("quantize", var.name, _tensor(var), place, *fate)

    def _origin(self, source: Any) -> tuple[str, str]:
        """What kernel's epilogue a quantize of `source` ends up in."""
        from tvm import relax

        var, name = source, op_name(self.definitions[source])
        for _ in range(32):
            if name not in (*ELEMENTWISE, "quantize", "dequantize", "reshape", "permute_dims", "concat"):
                break
            inputs = [
                a for a in _arguments(self.definitions[var]) if isinstance(a, relax.Var) and a in self.definitions
            ]
            if name == "dequantize" or not inputs:
                return EPILOGUE, "computed with the element-wise operators before it"
            anchors = [i for i in inputs if op_name(self.definitions[i]) != "dequantize"]
            if not anchors:
                return EPILOGUE, "requantised in one element-wise kernel"
            var = anchors[0]
            name = op_name(self.definitions[var])
        if any(rule in self.fired(var) for rule in INTEGER_RULES):
            return INTEGER, f"in the epilogue of the integer {name}"
        if name in SUMMED:
            return INTEGER, f"in the epilogue of {name} over codes"
        reason = self.reasons(var) if name in ("nn.conv2d", "nn.conv2d_transpose", "matmul") else ""
        return FLOAT, f"in the epilogue of the float {name or 'kernel'}" + (f": {reason}" if reason else "")


def _arguments(value: Any) -> list[Any]:
    """The operands of a binding's value, tuples opened."""
    import tvm
    from tvm import relax

    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    if isinstance(value, relax.Tuple):
        return [f for field in value.fields for f in ([field] if isinstance(field, relax.Var) else _arguments(field))]
    if not isinstance(value, tvm.ir.Call):
        return [value]
    return [a for arg in value.args for a in (_arguments(arg) if isinstance(arg, relax.Tuple) else [arg])]


def _tensor(expr: Any) -> str:
    dims = dims_of(expr)
    return f"{dtype_of(expr)} {'[' + ', '.join(str(d) for d in dims) + ']' if dims is not None else '?'}"


def write_report(func: Any, entries: tuple[QdqEntry, ...]) -> Any:
    """The function with the account attached; unchanged when there is nothing to tell."""
    return func.with_attr(ATTRIBUTE, json.dumps([asdict(e) for e in entries])) if entries else func


def read_report(mod: Any, graph: Any = None) -> QdqReport:
    """The account that travels with a module; with the lowered graph also which tensors stayed float."""
    from tvm import relax

    entries: list[QdqEntry] = []
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function) and func.attrs is not None and ATTRIBUTE in func.attrs:
            entries += [QdqEntry(**e) for e in json.loads(str(func.attrs[ATTRIBUTE]))]
    if graph is None or not entries:
        return QdqReport(tuple(entries))
    return QdqReport(tuple(entries), floats_between(graph), _float_kernels(graph))


def _float_kernels(graph: Any) -> tuple[str, ...]:
    """Kernels whose data is all float."""
    codes: Callable[[str], bool] = lambda t: graph.tensors[t].dtype in ("int8", "uint8")  # noqa: E731
    return tuple(n.op or n.kernel for n in graph.nodes if not any(codes(t) for t in (*n.inputs, *n.outputs)))
