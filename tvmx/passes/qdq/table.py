"""Element-wise chains from codes to codes become one look-up in a table of 256 entries.

quantize(f(dequantize(q)))  →  table[q]      f: element-wise operators and scalar constants, further Q/DQ pairs included

Quantisers put Q and DQ around every operator of an activation function (HardSwish as five of them, a learned scale and
shift); each rounds, so the chain cannot be computed in floats at once. A table holds exactly what the chain gives for
each of the 256 codes, and permutations of bytes look up a vector of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmx.passes.constants import as_array, as_constant
from tvmx.passes.fold import EVALUATORS
from tvmx.passes.legalize.lookup import shortest_chain
from tvmx.passes.qdq.params import RANGE, QParams, dequantize_array, qparams
from tvmx.passes.qdq.requantize import RESHAPES
from tvmx.passes.rewrite import Events, dims_of, dtype_of, op_name
from tvmx.target import Target

MIN_ELEMENTS = 1 << 10  # a kernel of its own costs more than the arithmetic on fewer

Array = np.ndarray[Any, Any]


def _clip(call: Any, args: list[Array]) -> Array:
    low, high = (np.float32(a.value) for a in call.args[1:3])
    clipped: Array = np.clip(args[0], low, high)
    return clipped


def _sigmoid(call: Any, args: list[Array]) -> Array:
    return np.asarray(1 / (1 + np.exp(-args[0].astype(np.float64))), np.float32)


def _erf(call: Any, args: list[Array]) -> Array:
    values: Array = np.array([math.erf(v) for v in args[0].ravel()], np.float32).reshape(args[0].shape)
    return values


def _leaky(call: Any, args: list[Array]) -> Array:
    found: Array = np.where(args[0] > 0, args[0], args[0] * np.float32(call.attrs.alpha))
    return found


_ELEMENTWISE = (
    "abs", "add", "astype", "ceil", "divide", "exp", "floor", "log", "maximum", "minimum", "multiply", "negative",
    "nn.relu", "power", "round", "rsqrt", "sqrt", "square", "subtract", "tanh",
)  # fmt: skip
_VALUES: dict[str, Callable[[Any, list[Array]], Array | None]] = {
    **{name: EVALUATORS[name] for name in _ELEMENTWISE},
    "clip": _clip,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "nn.leakyrelu": _leaky,
    "nn.silu": lambda call, args: np.asarray(args[0] * _sigmoid(call, args), np.float32),
}


@dataclass(frozen=True, eq=False)
class Chain:
    """A tensor that is a function of the 8-bit codes in variable `root`: its value for each code, lowest first."""

    root: Any
    values: Array
    steps: int  # operators since the root


def tabulate(target: Target, events: Events) -> Any:
    """The pass; it does nothing for a target that cannot look up bytes. What it replaced is added to `events`."""
    import tvm
    from tvm import relax

    def run(mod: Any, _: Any) -> Any:
        least = shortest_chain(target)
        if least is None:
            return mod
        mod = mod.clone()
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
                found, names = _chains(func, least)
                if found:
                    walker = _walker()(mod, found, target)
                    after = walker.visit_expr(func)
                    mod = walker.builder_.get()
                    mod[gv] = after
                    for name in names:
                        events.setdefault(name, []).append(("table", None))
        return relax.transform.DeadCodeElimination()(mod)

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.Tabulate")


def _chains(func: Any, least: int) -> tuple[dict[Any, Chain], list[str]]:
    """The quantize bindings that a table replaces, `least` operators or more from their root; the names of all
    variables that belong to chains of such roots."""
    chains: dict[Any, Chain] = {}
    scalars: dict[Any, Array] = {}
    found: dict[Any, Chain] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            var, value = binding.var, binding.value
            name = op_name(value)
            if not name:
                continue
            if name == "dequantize":
                codes = as_array(value.args[0])
                if codes is not None:
                    params = qparams(value, str(codes.dtype))
                    if codes.size == 1 and isinstance(params, QParams):
                        scalars[var] = dequantize_array(codes, params)
                    continue
            if name in RESHAPES and value.args[0] in scalars:
                scalars[var] = scalars[value.args[0]]
                continue
            chain = _next(name, value, chains, scalars)
            if chain is None or dims_of(var) != dims_of(chain.root):
                continue
            chains[var] = chain
            if name == "quantize" and chain.steps >= least and _size(var) >= MIN_ELEMENTS:
                found[var] = chain
    roots = {chain.root for chain in found.values()}
    return found, [var.name for var, chain in chains.items() if chain.root in roots]


def _size(var: Any) -> int:
    dims = dims_of(var) or ()
    return math.prod(d if isinstance(d, int) else 0 for d in dims)


def _next(name: str, call: Any, chains: dict[Any, Chain], scalars: dict[Any, Array]) -> Chain | None:
    """The chain that `call` continues or begins."""
    from tvm import relax

    if name in ("dequantize", "quantize"):
        return _converted(name, call, chains)
    if name not in _VALUES:
        return None
    operands: list[Array] = []
    root, steps = None, 0
    for arg in call.args:
        if not isinstance(arg.ty, relax.TensorType):
            continue
        chain = chains.get(arg) if isinstance(arg, relax.Var) else None
        if chain is not None:
            if root is not None and not root.same_as(chain.root):
                return None
            root, steps = chain.root, max(steps, chain.steps)
            operands.append(chain.values)
            continue
        scalar = scalars.get(arg) if isinstance(arg, relax.Var) else as_array(arg)
        if scalar is None or scalar.size != 1:
            return None
        operands.append(scalar.reshape(()))
    if root is None:
        return None
    with np.errstate(all="ignore"):
        values = _VALUES[name](call, operands)
    if values is None or values.shape != (256,):
        return None
    return Chain(root, values.astype(dtype_of(call)), steps + 1)


def _converted(name: str, call: Any, chains: dict[Any, Chain]) -> Chain | None:
    from tvm import relax

    source = call.args[0]
    if not isinstance(source, relax.Var):
        return None
    chain = chains.get(source)
    if name == "dequantize":
        dtype = dtype_of(source)
        params = qparams(call, dtype)
        if dtype not in RANGE or not isinstance(params, QParams) or not params.per_tensor:
            return None
        if dtype_of(call) != "float32":
            return None
        low, high = RANGE[dtype]
        if chain is None:
            chain = Chain(source, np.arange(low, high + 1).astype(dtype), 0)
        return Chain(chain.root, dequantize_array(chain.values, params), chain.steps + 1)
    params = qparams(call, dtype_of(call))
    if chain is None or not isinstance(params, QParams) or not params.per_tensor or params.dtype not in RANGE:
        return None
    low, high = RANGE[params.dtype]
    with np.errstate(all="ignore"):
        steps = np.rint(chain.values / params.scale)
        codes = np.clip(np.nan_to_num(steps) + params.zero, low, high)
    return Chain(chain.root, codes.astype(params.dtype), chain.steps + 1)


_CLASS: Any = None


def _walker() -> Any:
    global _CLASS
    if _CLASS is None:
        from tvm import relax

        from tvmx.passes.legalize.lookup import emit_lookup

        @relax.expr_functor.mutator
        class Tabulator(relax.PyExprMutator):  # type: ignore[misc]
            def __init__(self, mod: Any, found: dict[Any, Chain], target: Target) -> None:
                super().__init__(mod)
                self.target = target
                self.found = found

            def visit_var_binding_(self, binding: Any) -> None:
                chain = self.found.get(binding.var)
                if chain is None:
                    super().visit_var_binding_(binding)
                    return
                root = self.visit_expr(chain.root)
                if (chain.values == np.arange(*_span(dtype_of(root)))).all() and chain.values.dtype == dtype_of(root):
                    value = root
                else:
                    table, shape = as_constant(chain.values), dims_of(root) or ()
                    value = emit_lookup(self.builder_, root, table, shape, self.target)
                super().visit_var_binding_(relax.VarBinding(binding.var, self.builder_.normalize(value)))

            def visit_var_(self, var: Any) -> Any:
                found = self.get_var_remap(var)
                return var if found is None else found

            def visit_dataflow_var_(self, var: Any) -> Any:
                return self.visit_var_(var)

        _CLASS = Tabulator
    return _CLASS


def _span(dtype: str) -> tuple[int, int]:
    low, high = RANGE[dtype]
    return low, high + 1
