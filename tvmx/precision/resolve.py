"""Rules + the operators of a program + a target → a plan. Every decision leaves its reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvmx.errors import ConfigError
from tvmx.precision.kinds import BOUNDED, KINDS, SENSITIVE
from tvmx.precision.machine import has_arithmetic, judge
from tvmx.precision.operator import Operator
from tvmx.precision.plan import Entry, PrecisionPlan
from tvmx.precision.rules import FP16_MAX, FP16_MIN, OF_DTYPE, SHORT, Assignment, PrecisionRules, is_glob, match
from tvmx.target import Target

FP32 = Assignment("fp32")
CALIBRATE = "calibrate the model first: `tvmx quantize model.onnx --calib DATA -o model.int8.onnx`, then compile that"


def resolve(
    rules: PrecisionRules, operators: Sequence[Operator], target: Target, also_known: Iterable[str] = ()
) -> PrecisionPlan:
    """Assign every operator its precision.

    Raises ConfigError for a name or kind in `rules` that nothing in the program has (`also_known`: names of other
    programs of the same model), and for int8 where the model holds no Q/DQ.
    """
    check_names(rules, operators, also_known)
    work = _Resolver(rules, operators, target)
    work.choose()
    work.keep_ends()
    work.keep_in_range()
    work.ask_target()
    work.move_with_neighbours()
    entries = tuple(
        Entry(op.name, op.kind, choice.assignment, choice.reason, work.only_stored(op, choice))
        for op, choice in zip(operators, work.choices)
    )
    return PrecisionPlan(entries, rules.io)


def check_names(rules: PrecisionRules, operators: Sequence[Operator], also_known: Iterable[str] = ()) -> None:
    """Every name, glob and kind in the rules must mean something. Raises ConfigError listing what is near."""
    names = list(dict.fromkeys([*(n for op in operators for n in op.names), *also_known]))
    for table in (rules.operators, rules.ranges):
        for pattern in table:
            if pattern not in names and not (is_glob(pattern) and match({pattern: FP32}, tuple(names))):
                raise ConfigError(f"no operator is named {pattern!r}; {nearest(pattern, names)}")
    kinds = {*KINDS, *(k.removeprefix("nn.") for k in KINDS)}
    kinds.update(name for op in operators for name in _kinds_of(op))
    for pattern in rules.kinds:
        if pattern not in kinds and not (is_glob(pattern) and match({pattern: FP32}, tuple(kinds))):
            from onnx import defs

            kinds.update(schema.name for schema in defs.get_all_schemas())
            if pattern not in kinds:
                raise ConfigError(f"no operator kind {pattern!r}; {nearest(pattern, sorted(kinds))}")


def nearest(name: str, names: Sequence[str]) -> str:
    """ "did you mean …" for the end of an error."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    folded = [n for n in names if name.lower().strip("*") in n.lower()][:3] if not near else []
    found = near or folded or list(names)[:3]
    return f"did you mean {', '.join(map(repr, found))}?" if found else "the program has none"


def _kinds_of(op: Operator) -> tuple[str, ...]:
    return (op.kind, op.kind.removeprefix("nn."), *op.types)


@dataclass
class _Choice:
    assignment: Assignment
    reason: str
    named: bool = False  # the user named this operator: only what is impossible overrules it


@dataclass
class _Resolver:
    rules: PrecisionRules
    operators: Sequence[Operator]
    target: Target
    choices: list[_Choice] = field(default_factory=list)

    def choose(self) -> None:
        """What the rules say, before anything is known of values and target."""
        quantised = any(op.quantized for op in self.operators)
        if self.rules.default == "int8" and not quantised:
            raise ConfigError(f"int8 needs value ranges, and the model holds no QuantizeLinear; {CALIBRATE}")
        self.choices = [self._choice(op) for op in self.operators]

    def _choice(self, op: Operator) -> _Choice:
        named = match(self.rules.operators, op.names)
        kind = match(self.rules.kinds, _kinds_of(op))
        if named or kind:
            pattern, wanted = named or kind  # type: ignore[misc]
            reason = f"named by {pattern!r}" if named else f"kind {pattern!r}"
            if wanted.precision == "int8" and not op.quantized:
                if named:
                    raise ConfigError(f"{op.name} is to run in int8 but has no Q/DQ around it; {CALIBRATE}")
                return _Choice(FP32, "no Q/DQ around it")
            choice = _Choice(wanted, reason, named=bool(named))
        elif op.quantized:
            return _Choice(Assignment("int8"), "the model's own Q/DQ")
        elif op.dtype != "float32":
            known = OF_DTYPE.get(op.dtype)
            return _Choice(Assignment(known) if known else FP32, f"the model's own {op.dtype}", named=True)
        elif op.mixed:
            return _Choice(FP32, "the model's own float32, beside its 16-bit values")
        elif self.rules.default == "int8":
            return _Choice(FP32, "no Q/DQ around it")
        elif self.rules.default in SHORT and op.kind in SENSITIVE:
            return _Choice(FP32, f"sensitive: {op.kind}")
        else:
            choice = _Choice(Assignment(self.rules.default), "default")
        if op.dtype != "float32" and op.role != "dense" and choice.assignment.precision != OF_DTYPE.get(op.dtype):
            return _Choice(Assignment(OF_DTYPE.get(op.dtype, "fp32")), f"the model's own {op.dtype}", named=True)
        if op.role == "opaque" and choice.assignment.precision in SHORT:
            return _Choice(FP32, "its kernel is made for float32")
        return choice

    def keep_ends(self) -> None:
        """First and last product in float32, by option."""
        dense = [i for i, op in enumerate(self.operators) if op.role == "dense"]
        for wanted, position, what in (
            (self.rules.keep_first, dense[:1], "first"),
            (self.rules.keep_last, dense[-1:], "last"),
        ):
            for i in position if wanted else ():
                if not self.choices[i].named:
                    self.choices[i] = _Choice(FP32, f"{what} layer, kept by option")

    def keep_in_range(self) -> None:
        """float16 ends at 65504: an operator whose constants or observed values lie beyond stays in float32.

        So does what reads its result, until an operator bounds the values again. Observed ranges settle it where
        they are given.
        """
        large: list[str] = []  # per operator: why its result may not fit, or ""
        for i, op in enumerate(self.operators):
            observed = next((self.rules.ranges[n] for n in op.names if n in self.rules.ranges), None)
            incoming = next((large[p] for p in op.producers if large[p]), "")
            why = _outside(op) or (f"reads {incoming}" if incoming else "")
            if observed is not None and observed > FP16_MAX:
                why = f"observed magnitude {observed:g} exceeds float16"
            choice = self.choices[i]
            if why and choice.assignment.precision == "fp16" and op.dtype == "float32":
                self.choices[i] = _Choice(FP32, why)
            grows = observed > FP16_MAX if observed is not None else op.largest > FP16_MAX or not op.finite or incoming
            if op.kind in BOUNDED or (op.kind == "clip" and op.largest <= FP16_MAX):
                grows = False
            large.append((incoming or f"the result of {op.name}, which may exceed float16") if grows else "")

    def ask_target(self) -> None:
        """Where the target has no such arithmetic, 16 bits are storage only, and only where that is faster."""
        total = sum(op.weights for op in self.operators)
        for i, (op, choice) in enumerate(zip(self.operators, self.choices)):
            precision = choice.assignment.precision
            if precision not in SHORT or choice.named or op.dtype != "float32":
                continue
            verdict = judge(op, precision, self.target, total)
            if verdict.short or self.rules.prefer == "speed" or not op.weights:
                assignment = choice.assignment if verdict.short else FP32
                self.choices[i] = _Choice(assignment, verdict.reason)
            else:
                choice.reason = f"{choice.reason}: size preferred, {verdict.reason}"

    def only_stored(self, op: Operator, choice: _Choice) -> bool:
        precision = choice.assignment.precision
        return precision in SHORT and op.role == "dense" and not has_arithmetic(self.target, precision, op)

    def move_with_neighbours(self) -> None:
        """An operator that only moves elements takes the type that comes in, or the one that all its readers want."""
        free = [
            op.role == "move" and not op.weights and not self.choices[i].named and op.dtype == "float32"
            for i, op in enumerate(self.operators)
        ]
        readers: list[list[int]] = [[] for _ in self.operators]
        for i, op in enumerate(self.operators):
            for producer in op.producers:
                readers[producer].append(i)
        for i, op in enumerate(self.operators):
            if free[i]:
                found = {self.choices[p].assignment.precision for p in op.producers}
                same = found.pop() if len(found) == 1 else "fp32"
                self.choices[i] = _Choice(Assignment(same) if same in SHORT else FP32, "moves data: as it comes in")
        for i in reversed(range(len(self.operators))):
            wanted = {self._wants(r) for r in readers[i]}
            if free[i] and len(wanted) == 1 and self.choices[i].assignment == FP32 and not self.operators[i].result:
                want = wanted.pop()
                if want in SHORT:
                    self.choices[i] = _Choice(Assignment(want), "moves data: as its readers want it")

    def _wants(self, reader: int) -> str:
        """The precision in which operator `reader` reads, if it reads in its own."""
        op, choice = self.operators[reader], self.choices[reader]
        own = op.role == "move" or (op.role == "dense" and not self.only_stored(op, choice))
        return choice.assignment.precision if own else "fp32"


def _outside(op: Operator) -> str:
    if not op.finite:
        return "a constant holds an infinity or NaN"
    if op.largest > FP16_MAX:
        return f"constant {op.largest:g} exceeds float16"
    if op.role == "elementwise" and op.smallest < FP16_MIN:
        return f"constant {op.smallest:g} vanishes in float16"
    return ""
