"""A fully lowered Relax module → Graph: call_tir becomes a node, reshapes become aliases, the rest is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmx.graph import COPY, Dimension, Graph, Guard, Node, NotStraightLine, Shape, Tensor, TensorKind
from tvmx.kernel_facts import KernelFacts, kernel_facts

_VIEW_OPS = frozenset({"relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims", "relax.memory.view"})
_IDENTITY_OPS = frozenset({"relax.builtin.stop_lift_params", "relax.annotate.memory_scope"})
_AGREEMENT = "runtime.TVMTensorCreateView"  # what relax.memory.view is legalised to
_VIEW_BUILTINS = frozenset({"vm.builtin.reshape", "vm.builtin.view", _AGREEMENT})


def extract(mod: Any, input_names: Sequence[str], output_names: Sequence[str], name: str) -> Graph:
    """See `tvmx.graph.from_relax`."""
    reader = _Reader(mod, input_names, output_names)
    results = reader.read_main()
    assert len(results) == len(output_names), f"main returns {len(results)} values, the model {output_names}"
    return _with_outputs(reader, name, tuple(input_names), results, tuple(output_names))


def dim_text(expr: Any) -> Dimension:
    """A TVM integer expression in the language of `tvmx.runtime.dims`, or an int."""
    return expr if isinstance(expr, int) else _Printer().dim(expr)


class _Printer:
    """Prints index arithmetic. Symbolic variables keep their names, which are identifiers."""

    def dim(self, expr: Any) -> Dimension:
        value = getattr(expr, "value", None)
        if value is not None and type(expr).__name__ == "IntImm":
            return int(value)
        return self.text(expr)

    def text(self, expr: Any) -> str:
        kind = type(expr).__name__
        if isinstance(expr, int) or kind == "IntImm":
            return str(int(expr if isinstance(expr, int) else expr.value))
        if kind == "Var":
            return _identifier(expr.name)
        if kind == "Cast":
            return self.text(expr.value)
        if kind in _INFIX:
            return f"({self.text(expr.a)} {_INFIX[kind]} {self.text(expr.b)})"
        if kind in ("Min", "Max"):
            return f"{kind.lower()}({self.text(expr.a)}, {self.text(expr.b)})"
        if kind == "Select":
            return self._choice(expr.condition, expr.true_value, expr.false_value)
        if kind == "Call" and getattr(expr.op, "name", "").endswith(".if_then_else"):
            return self._choice(*expr.args)
        if kind == "Not":
            return f"(0 if {self.text(expr.a)} else 1)"
        raise NotStraightLine(f"a dimension is computed by {kind}: {expr}")

    def _choice(self, condition: Any, then: Any, otherwise: Any) -> str:
        return f"({self.text(then)} if {self.text(condition)} else {self.text(otherwise)})"


# Dims are non-negative, so truncating and flooring division agree.
_INFIX = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "Div": "//", "FloorMod": "%", "Mod": "%",
    "EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "And": "and", "Or": "or",
}  # fmt: skip


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "d_" + "".join(c if c.isalnum() else "_" for c in name)


class _Reader:
    """Walks main's bindings once. `values` maps a Relax variable to a tensor name or a tuple of values."""

    def __init__(self, mod: Any, input_names: Sequence[str], output_names: Sequence[str]) -> None:
        self.mod = mod
        self.input_names = list(input_names)
        self.taken = set(input_names) | set(output_names)
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self.values: dict[Any, Any] = {}
        self.facts: dict[str, KernelFacts] = {}
        self._constant_names: dict[tuple[str, Shape, bytes], str] = {}
        self.guards: list[Guard] = []

    def read_main(self) -> list[str]:
        """Read every binding; the names of the tensors that main returns."""
        from tvm import relax

        main = self.mod["main"]
        assert len(main.params) == len(self.input_names), (
            f"main has {len(main.params)} parameters, the model {self.input_names}"
        )
        for param, name in zip(main.params, self.input_names):
            self._add(name, param.ty, "input")
            self.values[param] = name
        if not isinstance(main.body, relax.SeqExpr):
            raise NotStraightLine(f"main is a {type(main.body).__name__}")
        for block in main.body.blocks:
            for binding in block.bindings:
                self._read_binding(binding)
        result = self._value(main.body.body)
        return list(_flatten(result))

    def _read_binding(self, binding: Any) -> None:
        from tvm import relax

        if isinstance(binding, relax.MatchCast):
            value = self._value(binding.value)
            if not isinstance(value, str) or self._shape(binding.ty) != self.tensors[value].shape:
                raise NotStraightLine(f"{binding.var.name} has a shape that is only known while running")
            self.values[binding.var] = value
            return
        self.values[binding.var] = self._bound(binding.var, binding.value)

    def _guard(self, source: str, view: str) -> None:
        """The view is right where its dims are those of `source` (`tvmx.frontend.agree`)."""
        held, wanted = self.tensors[source].shape, self.tensors[view].shape
        assert len(held) == len(wanted), f"{view} is a view of another rank"
        for guard in (Guard(a, b) for a, b in zip(held, wanted) if a != b):
            if guard not in self.guards:
                self.guards.append(guard)

    def _bound(self, var: Any, value: Any) -> Any:
        from tvm import relax
        from tvm.ir import Call

        if isinstance(value, relax.If):
            raise NotStraightLine(f"{var.name} is an If")
        if not isinstance(value, Call):
            return self._value(value)
        op = getattr(value.op, "name", None) or type(value.op).__name__
        if op == "relax.call_tir":
            return self._call_tir(var, value)
        if op in _IDENTITY_OPS:
            return self._value(value.args[0])
        if op in _VIEW_OPS or (op == "relax.call_pure_packed" and _packed_name(value) in _VIEW_BUILTINS):
            source = self._value(value.args[0] if op in _VIEW_OPS else value.args[1])
            view = self._add(self._fresh(var.name), var.ty, "intermediate", alias_of=source)
            if op == "relax.memory.view" or _packed_name(value) == _AGREEMENT:
                self._guard(source, view)
            return view
        if op == "relax.null_value":
            return None  # an argument of memory.view that is left out
        if op == "relax.shape_of":
            return None  # only dims bound by match_cast matter, and those are refused
        raise NotStraightLine(f"{var.name} calls {op}" + (f" {_packed_name(value)}" if "packed" in op else ""))

    def _call_tir(self, var: Any, call: Any) -> Any:
        symbol = str(call.args[0].name_hint)
        inputs, leading = [], []
        for arg in call.args[1].fields if hasattr(call.args[1], "fields") else [call.args[1]]:
            if _is_scalar(arg):
                leading.append(str(dim_text(arg)))
                continue
            assert not leading, f"{symbol}: a tensor follows a scalar argument"
            value = self._value(arg)
            if not isinstance(value, str):
                raise NotStraightLine(f"{symbol} takes a tuple")
            inputs.append(value)
        trailing = [str(dim_text(v)) for v in call.args[2].values] if len(call.args) > 2 else []
        types = var.ty.fields if hasattr(var.ty, "fields") else None
        if types is None:
            names = [self._add(self._fresh(var.name), var.ty, "intermediate")]
        else:
            names = [self._add(self._fresh(f"{var.name}.{i}"), t, "intermediate") for i, t in enumerate(types)]
        facts = self._kernel_facts(symbol, len(inputs))
        self.nodes.append(
            Node(
                name=f"{len(self.nodes):03}_{symbol}",
                kernel=symbol,
                inputs=tuple(inputs),
                outputs=tuple(names),
                scalars=(*leading, *trailing),
                leading_scalars=len(leading),
                inplace=facts.inplace,
                op=facts.op,
                flops=facts.flops,
                moves=facts.moves,
            )
        )
        return names[0] if types is None else tuple(names)

    def _kernel_facts(self, symbol: str, n_inputs: int) -> KernelFacts:
        if symbol not in self.facts:
            self.facts[symbol] = kernel_facts(self.mod[symbol], symbol, n_inputs)
        return self.facts[symbol]

    def _value(self, expr: Any) -> Any:
        from tvm import relax
        from tvm.ir import Constant, TupleGetItem

        if isinstance(expr, Constant) and hasattr(expr, "value") and not _is_scalar(expr):
            return self._constant(expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(f) for f in expr.fields)
        if isinstance(expr, TupleGetItem):
            return self._value(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, relax.ShapeExpr):
            return None
        try:
            return self.values[expr]
        except (KeyError, TypeError):
            raise NotStraightLine(f"main uses a {type(expr).__name__} as a value") from None

    def _constant(self, expr: Any) -> str:
        import hashlib

        array = as_numpy(expr.value)
        key = (str(expr.value.dtype), tuple(array.shape), hashlib.sha256(_raw(array)).digest())
        if key not in self._constant_names:
            name = self._add(self._fresh(f"const_{len(self.constants)}"), expr.ty, "constant")
            self.constants[name] = array
            self._constant_names[key] = name
        return self._constant_names[key]

    def _add(self, name: str, ty: Any, kind: TensorKind, alias_of: str | None = None) -> str:
        self.tensors[name] = Tensor(name, self._shape(ty), str(ty.dtype), kind, alias_of)
        return name

    def _shape(self, ty: Any) -> Shape:
        if getattr(ty, "shape", None) is None or not hasattr(ty.shape, "values"):
            raise NotStraightLine(f"a tensor has no shape that is known before running: {ty}")
        return tuple(dim_text(d) for d in ty.shape.values)

    def _fresh(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.taken:
            name, count = f"{wanted}_{count}", count + 1
        self.taken.add(name)
        return name


def _with_outputs(
    reader: _Reader, name: str, inputs: tuple[str, ...], results: list[str], output_names: tuple[str, ...]
) -> Graph:
    """Give results the model's output names; copy what cannot live in an output's own buffer."""
    tensors, nodes = dict(reader.tensors), list(reader.nodes)
    renamed: dict[str, str] = {}
    public: dict[str, str] = {}
    outputs: list[str] = []

    def root_of(tensor: str) -> str:
        while (parent := tensors[tensor].alias_of) is not None:
            tensor = parent
        return tensor

    for result, wanted in zip(results, output_names):
        out = wanted if wanted not in inputs and wanted not in outputs else reader._fresh(f"{wanted}.out")
        if out != wanted:
            public[out] = wanted
        source = renamed.get(result, result)
        root, info = root_of(source), tensors[source]
        if tensors[root].kind == "intermediate":
            # The value is made for the first time here: it is computed into the output's buffer.
            del tensors[source]
            tensors[out] = dataclasses.replace(info, name=out, kind="output", alias_of=None)
            renamed[source] = out
            for other in list(tensors.values()):
                if other.alias_of == source:
                    tensors[other.name] = dataclasses.replace(other, alias_of=out)
            if root != source:
                tensors[root] = dataclasses.replace(tensors[root], alias_of=out)
        else:
            tensors[out] = dataclasses.replace(info, name=out, kind="output", alias_of=None)
            nodes.append(Node(f"{len(nodes):03}_copy", COPY, (source,), (out,), op="copy"))
        outputs.append(out)

    def rename(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(renamed.get(n, n) for n in names)

    return Graph(
        name=name,
        inputs=inputs,
        outputs=tuple(outputs),
        tensors=tensors,
        nodes=tuple(dataclasses.replace(n, inputs=rename(n.inputs), outputs=rename(n.outputs)) for n in nodes),
        constants=reader.constants,
        public_names=public,
        guards=tuple(reader.guards),
    )


def as_numpy(tensor: Any) -> np.ndarray:
    """A TVM tensor's data without a copy where numpy knows the dtype."""
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        return np.asarray(tensor.numpy())


def _raw(array: np.ndarray) -> memoryview | bytes:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else b""


def _is_scalar(expr: Any) -> bool:
    """A scalar argument (an index expression) rather than a tensor."""
    return not hasattr(expr.ty, "ndim") and hasattr(expr.ty, "dtype")


def _packed_name(call: Any) -> str:
    return str(getattr(call.args[0], "global_symbol", "")) if call.args else ""


def _flatten(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, tuple):
        return [name for part in value for name in _flatten(part)]
    raise NotStraightLine("main returns something that is not a tensor")
