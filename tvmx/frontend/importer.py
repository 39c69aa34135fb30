"""ONNX model → Relax module: the steps in order, and the loop over the nodes."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from onnx import ModelProto, NodeProto, numpy_helper
from tvm import relax, tirx

from tvmx.config import Dim
from tvmx.errors import ModelError, TvmxError
from tvmx.frontend import fallback, values
from tvmx.frontend.expand import expand_functions
from tvmx.frontend.fold import fold
from tvmx.frontend.load import MAX_DIM, MAX_ELEMENTS, load_model
from tvmx.frontend.model import IndexCheck, Model, TensorInfo
from tvmx.frontend.names import NodeName, names_of, node_table
from tvmx.frontend.node import CONVERTERS, Expr, Node, bounded_dims, constant, dtype_of, np_dtype, shape_of
from tvmx.frontend.rewrite import rewrite_all
from tvmx.frontend.shapes import InputSpec, ShapeSpec, bind_constants, identifier, settle_shapes

log = logging.getLogger(__name__)

# Importing a family fills CONVERTERS.
_FAMILIES = ("shape", "elementwise", "nn", "index", "reduce", "image", "quant")

# Integer tensors up to this size are followed by value while importing (shape arithmetic).
STATIC_LIMIT = 4096

# Module attribute: JSON of `node_table`, one row per converted node. A variable `n12_…` holds a value of node 12.
NODES_ATTR = "tvmx.nodes"


def import_onnx(
    model: str | Path | bytes | ModelProto,
    shapes: ShapeSpec | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Model:
    """Import an ONNX model.

    `shapes`: input name → dims; an int is fixed, a string or `Dim` stays symbolic. Inputs left out
    keep the model's own dims. `constants`: input name → array, for inputs that are really
    parameters (axes, pads, a sampling rate); they cease to be inputs.

    Raises ModelError naming the node and operator for anything that cannot be imported.
    """
    return prepare(model, shapes, constants).convert()


@dataclass(frozen=True)
class Prepared:
    """A checked and folded model whose shapes are settled, before it is rewritten to plain operators."""

    proto: ModelProto
    name: str
    specs: list[InputSpec]
    bounds: dict[str, Dim]
    original: tuple[NodeName, ...] = ()  # the model's nodes as they were loaded
    large: Mapping[str, np.ndarray] = field(default_factory=dict)  # initializers that `proto` has as inputs

    def part(self, proto: ModelProto) -> Prepared:
        """A program cut out of this one, folded again."""
        kept = {i.name for i in proto.graph.input}
        return replace(self, proto=fold(proto, self.name), specs=[s for s in self.specs if s.name in kept])

    def convert(self) -> Model:
        """Rewrite to plain operators and convert to Relax. Raises ModelError."""
        return Importer(self._rewritten(), self.name, self.specs, self.bounds, self.original, self.large).run()

    def _rewritten(self) -> ModelProto:
        try:
            result = rewrite_all(self.proto)
        except TvmxError:
            raise
        except Exception as err:
            log.debug("rewriting failed", exc_info=True)
            raise ModelError(f"{self.name}: rewriting to plain operators failed: {err}") from err
        if result is self.proto:
            return result
        # A rewrite may bring in functions (DynamicQuantizeLinear) and new shape arithmetic.
        return fold(expand_functions(result, self.name), self.name)


def prepare(
    model: str | Path | bytes | ModelProto, shapes: ShapeSpec | None, constants: Mapping[str, np.ndarray] | None
) -> Prepared:
    """Load, check, bind constants, settle shapes, expand functions and fold. Raises ModelError."""
    loaded = load_model(model)
    proto, name = loaded.proto, loaded.name
    original = names_of(proto.graph.node)
    bind_constants(proto, constants or {}, name)
    specs, bounds = settle_shapes(proto, shapes or {}, name)
    specs = [s for s in specs if s.name not in loaded.large]
    load_families()
    return Prepared(fold(expand_functions(proto, name), name), name, specs, bounds, original, loaded.large)


def load_families() -> None:
    """Import every family of converters, which fills the table."""
    for family in _FAMILIES:
        importlib.import_module(f"tvmx.frontend.ops_{family}")


class Importer:
    """Converts one prepared graph. Values are kept by ONNX name, as expression or as known value."""

    def __init__(
        self,
        proto: ModelProto,
        name: str,
        specs: list[InputSpec],
        bounds: dict[str, Dim],
        original: Sequence[NodeName] = (),
        large: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.proto = proto
        self.name = name
        self.specs = specs
        self.bounds = bounds
        self.opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
        self.bb = _NamingBuilder()
        self.original = original
        self.large = large or {}
        self.notes: list[str] = []
        self.checks: list[IndexCheck] = []
        self._exprs: dict[str, Expr] = {}
        self._static: dict[str, np.ndarray] = {}
        self._symbolic = {n: tirx.Var(n, "int64") for n in bounds}
        # ONNX value → the model input it only reshapes or casts; see IndexCheck.
        self._origin: dict[str, str] = {}

    def run(self) -> Model:
        ranges = {self._symbolic[n]: (d.min, MAX_DIM if d.max is None else d.max) for n, d in self.bounds.items()}
        with bounded_dims(ranges):
            return self._run()

    def _run(self) -> Model:
        graph = self.proto.graph
        for tensor in graph.initializer:
            try:
                array = numpy_helper.to_array(tensor)
            except (ValueError, TypeError, RuntimeError) as err:
                raise ModelError(f"{self.name}: initializer {tensor.name!r} is damaged: {err}") from err
            self.set_array(tensor.name, array)
        for name, array in self.large.items():
            self.set_array(name, array)
        used: set[str] = set()
        params = []
        for spec in self.specs:
            shape = [self._symbolic[d] if isinstance(d, str) else d for d in spec.shape]
            var_name = unique(identifier(spec.name, "input"), used)
            var = relax.Var(var_name, relax.TensorType(shape, spec.dtype))
            params.append(var)
            self._exprs[spec.name] = var
            self._origin[spec.name] = spec.name
        with self.bb.function("main", params):
            with self.bb.dataflow():
                for position, node in enumerate(graph.node):
                    self._convert(node, position)
                results = [self.expr(o.name) for o in graph.output]
                # A constant, an input, or one tensor twice is a legal field of the tuple.
                out = self.bb.emit_output(relax.Tuple(results))
            self.bb.emit_func_output(out)
        mod = self.bb.finalize().with_attr(NODES_ATTR, json.dumps(node_table(graph.node, self.original)))
        outputs = tuple(self._info(o.name, r) for o, r in zip(graph.output, results))
        inputs = tuple(TensorInfo(s.name, s.shape, s.dtype) for s in self.specs)
        return Model(mod, self.name, inputs, outputs, self.bounds, tuple(self.notes), tuple(self.checks))

    def _info(self, name: str, expr: Expr) -> TensorInfo:
        try:
            dims = [d if isinstance(d, int) else str(d) for d in shape_of(expr)]
        except ValueError:
            dims = ["?"] * max(expr.ty.ndim, 0)
        return TensorInfo(name, tuple(dims), dtype_of(expr))

    # values by ONNX name

    def set_array(self, name: str, array: np.ndarray) -> None:
        """Record a value known now."""
        if array.size <= STATIC_LIMIT or array.dtype == object:
            self._static[name] = array
        else:
            self._exprs[name] = constant(array)

    def expr(self, name: str) -> Expr:
        """The value as a Relax expression, made from the known value where needed."""
        if name not in self._exprs:
            if name not in self._static:
                raise ModelError(f"{self.name}: {name!r} is used but nothing produces it")
            self._exprs[name] = values.materialise(self.bb, self._static[name])
        return self._exprs[name]

    def static(self, name: str) -> np.ndarray | None:
        if name in self._static:
            return self._static[name]
        expr = self._exprs.get(name)
        if isinstance(expr, tvm.ir.GenericConst):
            array: np.ndarray = expr.value.numpy()
            return array
        return None

    def origin(self, name: str) -> str | None:
        """The model input that this value only reshapes, slices or casts, if any."""
        return self._origin.get(name)

    # nodes

    def _convert(self, proto: NodeProto, position: int) -> None:
        node = Node(proto, self)
        self.bb.name_hint = f"n{position}_{identifier(proto.op_type, 'op')}_"
        try:
            folded = values.evaluate(node)
            if folded is not None:
                for out, array in zip(proto.output, folded):
                    if out:
                        self.set_array(out, array)
                return
            result = self._converter(node)(node)
            results = list(result) if isinstance(result, list | tuple) else [result]
            if len(results) < len([o for o in proto.output if o]):
                raise node.fail(f"only {len(results)} of {len(proto.output)} outputs are supported")
            for out, expr in zip(proto.output, results):
                if out and expr is not None:
                    self._exprs[out] = self._bind(expr)
                    _check_result(node, self._exprs[out])
        except TvmxError:
            raise
        except Exception as err:  # TVM raises whatever its C++ side threw
            log.debug("conversion failed", exc_info=True)
            raise node.fail(f"cannot be converted: {_readable(err)}") from err
        if proto.op_type in _PASSES_INDEX and proto.input and proto.input[0] in self._origin:
            for out in proto.output:
                self._origin[out] = self._origin[proto.input[0]]

    def _bind(self, expr: Expr) -> Expr:
        shape = getattr(getattr(expr.ty, "shape", None), "values", None) or ()
        dims = [int(d.value) for d in shape if isinstance(d, tirx.IntImm)]
        if len(dims) == len(shape) and 0 in dims:  # no element to compute: the zeros, without a kernel
            expr = constant(np.zeros(dims, np_dtype(dtype_of(expr))))
        if isinstance(expr, relax.Var | tvm.ir.GenericConst):
            return expr
        return self.bb.emit(expr)

    def _converter(self, node: Node) -> Any:
        found = CONVERTERS.get((node.domain, node.op))
        if found is None:
            found = fallback.find(node)
        if found is None:
            raise node.fail(
                "this operator is not supported; docs/operators.md lists the supported ones. "
                "Export the model without it, or cut the model before it"
            )
        return found


def _check_result(node: Node, expr: Expr) -> None:
    """Refuse results that no machine can hold, and those that come of contradictory attributes."""
    shape = getattr(getattr(expr.ty, "shape", None), "values", None)
    sizes = [int(d.value) for d in shape or () if isinstance(d, tirx.IntImm)]
    if any(d < 0 for d in sizes):
        raise node.fail(f"its result would have the impossible size {min(sizes)}")
    if math.prod(sizes) > MAX_ELEMENTS:
        raise node.fail(f"its result would have {math.prod(sizes)} elements, more than can be held")


def _readable(error: Exception) -> str:
    """The last line of what TVM raised, without the descriptions of its own objects."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"T\.(?:int64|int32)\((-?\d+)\)", r"\1", lines[-1]) if lines else type(error).__name__
    text = re.sub(r"^# Metadata omitted\.[^.]*\. ", "an operand ", text)
    text = re.sub(r"^In ir\.Op\(.*\), ", "", text)
    return text if len(text) <= 300 else f"{text[:300]}…"


class _NamingBuilder(relax.BlockBuilder):  # type: ignore[misc]
    """Names variables after the node being converted, so that later stages can speak of the model's own nodes."""

    name_hint = ""

    def emit(self, expr: Expr, name_hint: str = "") -> Expr:
        return super().emit(expr, name_hint or self.name_hint)


# Operators that hand on their input's elements unchanged in value.
_PASSES_INDEX = {
    "Reshape", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Transpose",
    "Expand", "Gather", "Split", "Tile",
}  # fmt: skip


def unique(name: str, used: set[str]) -> str:
    """`name`, or with the first free number appended; recorded in `used`."""
    candidate, k = name, 1
    while candidate in used:
        candidate, k = f"{name}_{k}", k + 1
    used.add(candidate)
    return candidate
