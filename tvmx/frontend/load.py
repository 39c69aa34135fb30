"""Reads an ONNX model and refuses what is broken or hostile before anything looks at it closer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, checker, external_data_helper, helper

from tvmx.errors import ModelError

MAX_DIM = 2**31 - 1
MAX_ELEMENTS = 2**40  # of one declared tensor; beyond it no machine can hold it
# The checker reads the whole file into one message, which protobuf caps.
PROTOBUF_LIMIT = 2**31 - 1

# Initializers in external files beyond this stay there: protobuf can neither copy nor serialise 2 GB.
DETACHED_BYTES = 2**30

STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Loaded:
    """A checked model with its external data inside it, but for what is too large for that.

    `large`: initializer → array (mapped from its file). In `proto` these are inputs, so that nothing copies them.
    """

    proto: ModelProto
    name: str
    large: Mapping[str, np.ndarray]


def load_model(source: str | Path | bytes | ModelProto) -> Loaded:
    """Read and check a model; the one given is not touched.

    Raises ModelError for a missing or unreadable file, a broken graph, external data outside the
    model's own folder, cycles, duplicate names, negative or absurd dims, or a missing opset.
    """
    folder: Path | None = None
    if isinstance(source, ModelProto):
        model = ModelProto()
        name = source.graph.name or "model"
        try:
            model.CopyFrom(source)
        except EncodeError as err:
            raise ModelError(
                f"{name}: a tensor over 2 GB cannot be copied ({err}); save the model with external data "
                "(onnx.save(..., save_as_external_data=True)) and give its path"
            ) from err
    elif isinstance(source, bytes | bytearray | memoryview):
        model, name = _parse(bytes(source), "the given bytes"), ""
        name = model.graph.name or "model"
    else:
        path = Path(source)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; give the path of an .onnx file")
        model, name = _parse(path.read_bytes(), str(path)), path.stem
        folder = path.parent.resolve()
    large = _load_external(model, folder, name)
    check_model(model, name)
    return Loaded(model, name, large)


def _parse(data: bytes, what: str) -> ModelProto:
    try:
        model = onnx.load_model_from_string(data)
    except (DecodeError, ValueError, RuntimeError) as err:
        raise ModelError(f"{what}: not an ONNX model or truncated ({err})") from err
    if not model.ByteSize() or not model.HasField("graph"):
        raise ModelError(f"{what}: not an ONNX model (it has no graph)")
    return model


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every subgraph in it, outermost first."""
    yield graph
    for node in graph.node:
        for attr in node.attribute:
            if attr.type == AttributeProto.GRAPH:
                yield from all_graphs(attr.g)
            for sub in attr.graphs:
                yield from all_graphs(sub)


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    for graph in all_graphs(model.graph):
        yield from graph.initializer
        for node in graph.node:
            for attr in node.attribute:
                if attr.type == AttributeProto.TENSOR:
                    yield attr.t
                yield from attr.tensors
    for function in model.functions:
        for node in function.node:
            for attr in node.attribute:
                if attr.type == AttributeProto.TENSOR:
                    yield attr.t


def _load_external(model: ModelProto, folder: Path | None, name: str) -> dict[str, np.ndarray]:
    """Read external data into the model; large initializers become inputs, and their arrays are returned."""
    large: dict[str, np.ndarray] = {}
    outermost = len(model.graph.initializer)  # the first that `_tensors` yields
    for index, tensor in enumerate(_tensors(model)):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        info = {entry.key: entry.value for entry in tensor.external_data}
        location = info.get("location", "")
        if folder is None:
            raise ModelError(
                f"{name}: tensor {tensor.name!r} lies in the external file {location!r}; "
                "give the path of the .onnx file instead of its content"
            )
        target = (folder / location).resolve()
        if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
            raise ModelError(
                f"{name}: tensor {tensor.name!r} points outside the model's folder ({location!r}); "
                "external data must lie beside the model"
            )
        if not target.is_file():
            raise ModelError(
                f"{name}: external data file {location!r} of tensor {tensor.name!r} is missing; put it into {folder}"
            )
        try:
            offset, length = int(info.get("offset", 0)), int(info.get("length", -1))
        except ValueError as err:
            raise ModelError(f"{name}: tensor {tensor.name!r} has a broken offset ({err})") from err
        size = target.stat().st_size
        if offset < 0 or offset > size or (length >= 0 and offset + length > size):
            raise ModelError(
                f"{name}: tensor {tensor.name!r} asks for bytes {offset}..{offset + length} of "
                f"{location!r}, which has {size}; the file is truncated or foreign"
            )
        if index < outermost and _bytes(tensor) > DETACHED_BYTES:
            large[tensor.name] = _mapped(tensor, target, offset, size, name)
            continue
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (ValueError, OSError, checker.ValidationError) as err:
            raise ModelError(f"{name}: tensor {tensor.name!r}: {err}") from err
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
    _detach(model.graph, set(large))
    return large


def _bytes(tensor: TensorProto) -> int:
    """Size of a tensor's data by its dims; 0 for types that are packed or that numpy does not have."""
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        return 0
    packed = dtype.name.startswith(("int4", "uint4", "int2", "uint2", "float4"))
    return 0 if packed or dtype.hasobject else math.prod(tensor.dims) * dtype.itemsize


def _mapped(tensor: TensorProto, path: Path, offset: int, size: int, name: str) -> np.ndarray:
    """The tensor's data where it lies in its file, read when it is used."""
    if offset + _bytes(tensor) > size:
        raise ModelError(
            f"{name}: tensor {tensor.name!r} of shape {tuple(tensor.dims)} needs bytes {offset}.."
            f"{offset + _bytes(tensor)} of {path.name!r}, which has {size}; the file is truncated or foreign"
        )
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(path, dtype, "r", offset, tuple(tensor.dims))


def _detach(graph: GraphProto, names: set[str]) -> None:
    """Make inputs of the initializers named."""
    given = {i.name for i in graph.input}
    kept = []
    for tensor in graph.initializer:
        if tensor.name not in names:
            kept.append(tensor)
        elif tensor.name not in given:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    if names:
        del graph.initializer[:]
        graph.initializer.extend(kept)


def check_model(model: ModelProto, name: str) -> None:
    """Raise ModelError unless the model is well-formed."""
    if not any(o.domain in STANDARD_DOMAINS for o in model.opset_import):
        raise ModelError(f"{name}: no opset for the standard domain is declared; re-export it")
    for graph in all_graphs(model.graph):
        _check_names(graph, name)
        _check_dims(graph, name)
    if _fits_protobuf(model):
        try:
            with _shapes_everywhere(model):
                checker.check_model(model)
        except checker.ValidationError as err:
            text = str(err).strip()
            # Exporters leave custom domains and newer opsets than the checker knows; conversion
            # decides about each operator by itself and names the node.
            if "No Op registered" in text or "No opset import for domain" in text:
                return
            raise ModelError(f"{name}: the ONNX checker refuses it: {text}") from err


@contextlib.contextmanager
def _shapes_everywhere(model: ModelProto) -> Iterator[None]:
    """Inputs and outputs without a shape get an empty one while the checker looks: it demands one, runtimes do not."""
    bare = [
        value.type.tensor_type
        for graph in all_graphs(model.graph)
        for value in (*graph.input, *graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    ]
    for tensor_type in bare:
        tensor_type.shape.SetInParent()
    try:
        yield
    finally:
        for tensor_type in bare:
            tensor_type.ClearField("shape")


def _fits_protobuf(model: ModelProto) -> bool:
    """Whether the model can be serialised: weights read from external data may exceed protobuf's 2 GB."""
    try:
        return bool(model.ByteSize() < PROTOBUF_LIMIT)
    except EncodeError:
        return False


def _check_names(graph: GraphProto, name: str) -> None:
    """Single assignment and topological order: together they exclude cycles."""
    given = [i.name for i in graph.input]
    produced: set[str] = set()
    for n in given:
        if n in produced:
            raise ModelError(f"{name}: two inputs are called {n!r}; rename one")
        produced.add(n)
    initializers = [i.name for i in graph.initializer]
    if len(set(initializers)) != len(initializers):
        double = next(n for n in initializers if initializers.count(n) > 1)
        raise ModelError(f"{name}: two initializers are called {double!r}; rename one")
    made_later = {out for node in graph.node for out in node.output if out}
    seen = produced | set(initializers)
    for node in graph.node:
        for inp in node.input:
            if inp in made_later and inp not in seen:
                raise ModelError(
                    f"{name}: node {node.name or node.op_type!r} uses {inp!r} before it is made: "
                    "the graph has a cycle or is not sorted"
                )
        for out in node.output:
            if not out:
                continue
            if out in seen:
                raise ModelError(f"{name}: {out!r} is produced twice; rename one")
            seen.add(out)


def _check_dims(graph: GraphProto, name: str) -> None:
    for tensor in graph.initializer:
        _check_size(name, tensor.name, list(tensor.dims))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if not value.type.HasField("tensor_type"):
            continue
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim if d.HasField("dim_value")]
        # -1 is what some exporters write for "unknown"; `shapes` decides about it.
        _check_size(name, value.name, [d for d in dims if d != -1])


def _check_size(name: str, tensor: str, dims: list[int]) -> None:
    total = 1
    for d in dims:
        if d < 0 or d > MAX_DIM:
            raise ModelError(f"{name}: tensor {tensor!r} has the impossible dim {d}")
        total *= d
    if total > MAX_ELEMENTS:
        raise ModelError(f"{name}: tensor {tensor!r} has {total} elements, more than can be held")
