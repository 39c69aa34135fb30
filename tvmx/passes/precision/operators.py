"""The operators of a Relax program as precision assignment sees them: names, kinds, sizes, constants, neighbours."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array
from tvmx.passes.precision.moves import moving_kernel
from tvmx.passes.rewrite import dims_of, op_name
from tvmx.precision.kinds import role_of
from tvmx.precision.operator import Operator

NODES_ATTR = "tvmx.nodes"  # set by the frontend: see tvmx.frontend.names.node_table
FLOATS = ("float32", "float16", "bfloat16")
_NODE_OF_VAR = re.compile(r"n(\d+)_")
SYMBOLIC = 64  # what an unknown dim is taken for when work is estimated
_NOT_ASSIGNED = ("quantize", "dequantize", "astype", "shape_of", "shape_to_tensor")


def node_names(mod: Any) -> list[str]:
    """Names of all ONNX nodes of a program, those that were merged into others included."""
    rows = json.loads(mod.attrs[NODES_ATTR]) if mod.attrs and NODES_ATTR in mod.attrs else []
    return [name for row in rows for name in (row[0], *(own[0] for own in row[3]))]


def list_operators(mod: Any) -> list[tuple[Any, Operator]]:
    """(bound variable, operator) of everything in `main` that computes on floating-point tensors."""
    from tvm import relax

    reader = _Reader(mod, _Nodes.of(mod))
    main = mod["main"]
    for block in main.body.blocks:
        for binding in block.bindings:
            if not isinstance(binding, relax.MatchCast):
                reader.binding(binding.var, binding.value)
    return reader.named(main.body.body)


@dataclass(frozen=True)
class _Nodes:
    """The ONNX nodes, and into which surviving node each one that was merged away went."""

    names: list[list[str]]  # per converted node: its name, then those of the model's nodes it stands for
    types: list[list[str]]
    merged: dict[int, list[int]]  # surviving node → the nodes it stands for, itself first

    @classmethod
    def of(cls, mod: Any) -> _Nodes:
        rows = json.loads(mod.attrs[NODES_ATTR]) if mod.attrs and NODES_ATTR in mod.attrs else []
        alive = {
            int(found[1])
            for block in mod["main"].body.blocks
            for b in block.bindings
            if (found := _NODE_OF_VAR.match(b.var.name))
        }
        merged: dict[int, list[int]] = {i: [i] for i in sorted(alive)}
        for i in range(len(rows)):
            home = _home(i, rows, alive)
            if home is not None and home != i:
                merged[home].append(i)
        names, types = ([[r[k], *(own[k] for own in r[3])] for r in rows] for k in (0, 1))
        return cls(names, types, merged)

    def stands_for(self, var: Any) -> list[int]:
        found = _NODE_OF_VAR.match(var.name)
        index = int(found[1]) if found else -1
        return self.merged.get(index, []) if index < len(self.names) else []


def _home(node: int, rows: list[Any], alive: set[int]) -> int | None:
    """The first node downstream that still has a binding."""
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop(0)
        if current in alive:
            return current
        for consumer in rows[current][2]:
            if consumer not in seen:
                seen.add(consumer)
                queue.append(consumer)
    return None


@dataclass
class _Reader:
    mod: Any
    nodes: _Nodes
    found: list[tuple[Any, Operator]] = field(default_factory=list)
    makers: dict[Any, tuple[int, ...]] = field(default_factory=dict)  # variable → operators that make its value
    values: dict[Any, Any] = field(default_factory=dict)
    mixed: bool = False

    def binding(self, var: Any, value: Any) -> None:
        import tvm
        from tvm import relax

        self.values[var] = value
        self.mixed = self.mixed or any(_dtype(r) in ("float16", "bfloat16") for r in _results(var.ty))
        if not isinstance(value, tvm.ir.Call) or op_name(value) in _NOT_ASSIGNED:
            self.makers[var] = self._producers(value)
            return
        kind = "take" if moving_kernel(self.mod, value) else op_name(value)
        operands = [a for a in flat(value.args) if _is_float(a)]
        results = _results(var.ty)
        dtype = next((d for d in map(_dtype, (*operands, *results)) if d in FLOATS), None)
        if dtype is None or not kind:
            self.makers[var] = self._producers(value)
            return
        numbers = _Constants.of(operands, kind)
        index = self.nodes.stands_for(var)
        operator = Operator(
            name=self.nodes.names[index[0]][0] if index else var.name,
            kind=str(value.args[0].name_hint) if kind == "call_tir" else kind,
            nodes=tuple(dict.fromkeys(name for i in index for name in self.nodes.names[i])),
            types=tuple(dict.fromkeys(name for i in index for name in self.nodes.types[i])),
            producers=self._producers(value),
            dtype=dtype,
            macs=_macs(kind, value),
            winograd=_may_use_winograd(kind, value),
            dots=_sums_of_pairs(kind, value),
            weights=numbers.weights,
            elements=sum(_size(r) for r in results if isinstance(r, relax.TensorType)),
            largest=max(numbers.largest, _attribute_size(value)),
            smallest=numbers.smallest,
            finite=numbers.finite,
            quantized=self._quantized(kind, operands),
        )
        self.makers[var] = (len(self.found),)
        self.found.append((var, operator))

    def _producers(self, value: Any) -> tuple[int, ...]:
        from tvm import relax

        found: list[int] = []
        for arg in flat([value]) if not hasattr(value, "args") else flat(value.args):
            if isinstance(arg, relax.Var):
                found.extend(self.makers.get(arg, ()))
        return tuple(dict.fromkeys(found))

    def _quantized(self, kind: str, operands: list[Any]) -> bool:
        """Every operand of a product or an addition comes out of dequantize."""
        if role_of(kind) == "opaque" or not operands:
            return False
        return all(op_name(self.values.get(a, a)) == "dequantize" for a in operands)

    def named(self, result: Any) -> list[tuple[Any, Operator]]:
        """Unique names: `node`, or `node:kind` where a node became several operators, numbered where that repeats."""
        returned = {i for arg in self._returned(result) for i in self.makers.get(arg, ())}
        count: dict[str, int] = {}
        for _, op in self.found:
            count[op.name] = count.get(op.name, 0) + 1
        taken: set[str] = set()
        named = []
        for i, (var, op) in enumerate(self.found):
            base = op.name if count[op.name] == 1 else f"{op.name}:{op.kind.removeprefix('nn.')}"
            name, number = base, 2
            while name in taken:
                name, number = f"{base}.{number}", number + 1
            taken.add(name)
            named.append((var, replace(op, name=name, result=i in returned, mixed=self.mixed)))
        return named

    def _returned(self, result: Any) -> list[Any]:
        value = self.values.get(result, result)
        return list(flat([value]))


def flat(values: Any) -> list[Any]:
    """Operands with tuples opened."""
    from tvm import relax

    found: list[Any] = []
    for value in values:
        if isinstance(value, relax.Tuple):
            found.extend(flat(value.fields))
        elif isinstance(value, relax.TupleGetItem):
            found.append(value.tuple_value)
        else:
            found.append(value)
    return found


def _results(ty: Any) -> list[Any]:
    fields = getattr(ty, "fields", None)
    return [ty] if fields is None else [r for f in fields for r in _results(f)]


def _dtype(value: Any) -> str:
    ty = getattr(value, "ty", value)
    return str(getattr(ty, "dtype", ""))


def _is_float(value: Any) -> bool:
    from tvm import relax

    return isinstance(getattr(value, "ty", None), relax.TensorType) and _dtype(value) in FLOATS


def _size(ty: Any) -> int:
    shape = getattr(ty, "shape", None)
    if shape is None or not hasattr(shape, "values"):
        return SYMBOLIC
    return math.prod(int(getattr(d, "value", SYMBOLIC)) for d in shape.values)


def _macs(kind: str, call: Any) -> int:
    """Multiply-accumulates of a product."""
    if role_of(kind) != "dense":
        return 0
    x, w = (dims_of(a) for a in call.args[:2])
    if x is None or w is None:
        return 0
    sizes = [d if isinstance(d, int) else SYMBOLIC for d in w]
    if kind == "matmul":
        return _size(call.ty) * (x[-1] if isinstance(x[-1], int) else SYMBOLIC)
    outputs = call.args[0].ty if "transpose" in kind else call.ty
    # weights OI* (IO* when transposed): each output (input) element meets all weights of its channel
    return _size(outputs) * math.prod(sizes) // max(1, sizes[0])


def _sums_of_pairs(kind: str, call: Any) -> bool:
    """A matrix product or a 1×1 convolution that sums over several channels, all shapes known.

    (In larger windows LLVM keeps the float32 sums of such kernels in memory: twice float32's time.)
    """
    if kind not in ("matmul", "nn.conv1d", "nn.conv2d"):
        return False
    shapes = [dims_of(e) for e in (*call.args[:2], call)]
    if any(s is None or len(s) < 2 or not all(isinstance(d, int) for d in s) for s in shapes):
        return False
    if kind == "matmul":
        return True
    weight = tuple(int(d) for d in shapes[1] or ())
    return weight[1] > 1 and all(d == 1 for d in weight[2:]) and as_array(call.args[1]) is not None


def _may_use_winograd(kind: str, call: Any) -> bool:
    """A dense 3×3 convolution of stride 1 over enough channels."""
    weight = dims_of(call.args[1]) if kind == "nn.conv2d" else None
    if weight is None or len(weight) != 4 or tuple(weight[2:]) != (3, 3) or int(call.attrs.groups) != 1:
        return False
    ones = (*call.attrs.strides, *call.attrs.dilation)
    return all(int(v) == 1 for v in ones) and all(isinstance(d, int) and d >= 32 and d % 4 == 0 for d in weight[:2])


@dataclass(frozen=True)
class _Constants:
    weights: int = 0
    largest: float = 0.0
    smallest: float = 1.0
    finite: bool = True

    @classmethod
    def of(cls, operands: list[Any], kind: str) -> _Constants:
        arrays = [a for a in map(as_array, operands) if a is not None and a.size]
        weights = sum(a.size for a in arrays) if role_of(kind) in ("dense", "move") else 0
        largest, smallest, finite = 0.0, 1.0, True
        for array in arrays:
            sizes = np.abs(array.astype(np.float64).ravel())
            usable = sizes[np.isfinite(sizes)]
            finite = finite and usable.size == sizes.size
            if usable.size:
                largest = max(largest, float(usable.max()))
            if usable.size == 1 and usable.any():  # an epsilon; tiny weights among others may vanish
                smallest = min(smallest, float(usable[usable > 0].min()))
        return cls(weights, largest, smallest, finite)


def _attribute_size(call: Any) -> float:
    """The largest bound of a clip, infinite ones included; padding's finite fill value."""
    if op_name(call) == "clip":
        return max(abs(float(a.value)) for a in call.args[1:])
    if op_name(call) == "nn.pad":
        value = float(call.attrs.pad_value)
        return abs(value) if math.isfinite(value) else 0.0
    return 0.0
