"""One ONNX node as the converters see it, and the table of converters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tvm
from onnx import AttributeProto, NodeProto, helper, numpy_helper
from tvm import relax, tirx
from tvm.relax import op as R

from tvmx.errors import ModelError
from tvmx.frontend.agree import agree

if TYPE_CHECKING:
    from tvmx.frontend.importer import Importer

Expr = Any  # relax.Expr; TVM ships no types
Converter = Callable[["Node"], Any]

# (domain, operator) → converter. Domains "" and "ai.onnx" are one.
CONVERTERS: dict[tuple[str, str], Converter] = {}

F = TypeVar("F", bound=Converter)


def converter(*ops: str, domain: str = "") -> Callable[[F], F]:
    """Register a converter for the named operators. It returns one Expr or a list of them."""

    def register(fn: F) -> F:
        for op in ops:
            assert (domain, op) not in CONVERTERS, f"{op} is registered twice"
            CONVERTERS[(domain, op)] = fn
        return fn

    return register


def shape_of(x: Expr) -> list[Any]:
    """Dims of a Relax tensor: ints and tirx expressions. Raises ValueError when unknown."""
    shape = x.ty.shape
    if shape is None or not hasattr(shape, "values"):
        raise ValueError("its shape is not known")
    return [simplify(v) for v in shape.values]


def dtype_of(x: Expr) -> str:
    return str(x.ty.dtype.dtype)


def simplify(value: Any) -> Any:
    """A python int if the expression is constant, otherwise the simplified expression."""
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    value = _ANALYZER.get()().simplify(value)
    return int(value.value) if isinstance(value, tirx.IntImm) else value


def _unbounded() -> Any:
    return tvm.sym.analyzer.Analyzer()


_ANALYZER: ContextVar[Callable[[], Any]] = ContextVar("analyzer", default=_unbounded)


@contextlib.contextmanager
def bounded_dims(ranges: Mapping[Any, tuple[int, int]]) -> Iterator[None]:
    """Inside, `simplify` knows that each symbolic dim lies in its inclusive range."""
    analyzer = _unbounded()
    for var, (low, high) in ranges.items():
        analyzer.bind(var, tvm.ir.Range.from_min_extent(tirx.const(low, "int64"), tirx.const(high - low + 1, "int64")))
    token = _ANALYZER.set(lambda: analyzer)
    try:
        yield
    finally:
        _ANALYZER.reset(token)


class Node:
    """A node with its inputs resolved. `inputs[i]` is None where the model leaves it out."""

    def __init__(self, proto: NodeProto, importer: Importer) -> None:
        self.proto = proto
        self.importer = importer
        self.bb = importer.bb
        self.op: str = proto.op_type
        self.attrs: dict[str, Any] = {a.name: attr_value(a) for a in proto.attribute}
        self.num_outputs = len(proto.output)
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        self.domain: str = domain
        self.opset: int = importer.opsets.get(domain, 1)

    def __len__(self) -> int:
        return len(self.proto.input)

    @property
    def name(self) -> str:
        """The node's own name, or its first output's where it has none."""
        return self.proto.name or next((o for o in self.proto.output if o), "")

    @property
    def label(self) -> str:
        return f"node {self.name!r} ({self.domain + '.' if self.domain else ''}{self.op})"

    def fail(self, message: str) -> ModelError:
        """The error to raise for this node."""
        return ModelError(f"{self.importer.name}: {self.label}: {message}")

    def has(self, i: int) -> bool:
        return i < len(self.proto.input) and self.proto.input[i] != ""

    def wants(self, i: int) -> bool:
        """Whether the model uses output i."""
        return i < len(self.proto.output) and self.proto.output[i] != ""

    def __getitem__(self, i: int) -> Expr:
        """Input i as a Relax expression; ModelError when it is left out."""
        if not self.has(i):
            raise self.fail(f"input {i} is missing")
        return self.importer.expr(self.proto.input[i])

    def get(self, i: int) -> Expr | None:
        return self[i] if self.has(i) else None

    @property
    def inputs(self) -> list[Expr | None]:
        return [self.get(i) for i in range(len(self.proto.input))]

    def shape(self, i: int) -> list[Any]:
        return self.dims(self[i])

    def dims(self, x: Expr) -> list[Any]:
        try:
            return shape_of(x)
        except ValueError as err:
            raise self.fail(
                f"an input has a shape that depends on data ({err}); tvmx needs shapes known from "
                "the model's inputs: bind the input it comes from with constants="
            ) from err

    def int_shape(self, i: int) -> list[int]:
        """Shape of input i, refused when symbolic."""
        dims = self.shape(i)
        if not all(isinstance(d, int) for d in dims):
            raise self.fail(
                f"input {self.proto.input[i]!r} has the symbolic shape {dims}, which this operator "
                "does not take; fix it with --shape NAME=1,3,224,224"
            )
        return dims

    def rank(self, i: int) -> int:
        return len(self.shape(i))

    def dtype(self, i: int) -> str:
        return dtype_of(self[i])

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def axis(self, value: int, rank: int) -> int:
        if not -rank <= value < max(rank, 1):
            raise self.fail(f"axis {value} is out of range for rank {rank}")
        return value + rank if value < 0 else value

    def static(self, i: int) -> np.ndarray | None:
        """Value of input i if known while importing; entries may be symbolic (dtype object)."""
        if not self.has(i):
            return None
        return self.importer.static(self.proto.input[i])

    def known(self, i: int, what: str) -> np.ndarray:
        """Value of input i, which must be known while importing."""
        value = self.static(i)
        if value is None:
            source = self.proto.input[i]
            raise self.fail(
                f"{what} (input {source!r}) must be known when compiling; bind the model input it "
                f"comes from, e.g. constants={{{source!r}: array}}"
            )
        return value

    def known_ints(self, i: int, what: str) -> list[int]:
        """Integers of input i, flattened; refused when symbolic."""
        value = self.known(i, what)
        flat = [simplify(v) if value.dtype == object else int(v) for v in value.reshape(-1)]
        if not all(isinstance(v, int) for v in flat):
            raise self.fail(f"{what} depends on a symbolic dim ({flat}); fix the input's shape")
        return flat

    def emit(self, expr: Expr) -> Expr:
        """Bind an expression; symbolic dims that it needs equal are made so, to be checked while running."""
        return self.bb.emit(agree(self, expr))

    def norm(self, expr: Expr) -> Expr:
        return self.bb.normalize(expr)

    def te(self, fn: Callable[..., Any], *args: Any, name: str | None = None) -> Expr:
        """Emit a kernel of ours, written in TE, on Relax arguments."""
        return self.bb.emit_te(fn, *args, primfunc_name_hint=name or self.op.lower())

    def const(self, value: Any, dtype: str) -> Expr:
        return constant(np.asarray(value, dtype=np_dtype(dtype)))


# Constants of types that are packed below a byte are held in the next type that is not.
WIDENED = {
    "int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8", "float4_e2m1fn": "float32",
}  # fmt: skip


def constant(array: np.ndarray) -> Expr:
    """A Relax constant of exactly this dtype (relax.const would narrow int64 and float64)."""
    array = np.asarray(array)
    if array.dtype.name in WIDENED:
        array = array.astype(WIDENED[array.dtype.name])
    if array.size == 0:
        # An empty constant cannot be written into a compiled module.
        return R.zeros(relax.ShapeExpr(array.shape), str(array.dtype))
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape)))


def np_dtype(name: str) -> np.dtype[Any]:
    """numpy dtype of a TVM dtype name, bfloat16 and float8 included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def attr_value(a: AttributeProto) -> Any:
    """Python value of an attribute: tensors become arrays, bytes become str."""
    if a.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(a.t)
    if a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return a
    value = helper.get_attribute_value(a)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if a.type == AttributeProto.STRINGS:
        return [v.decode(errors="replace") for v in value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
