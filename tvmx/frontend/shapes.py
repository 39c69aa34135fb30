"""Fixes the shapes of a model's inputs and binds inputs that are really parameters."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from tvmx.config import Dim
from tvmx.errors import ModelError
from tvmx.frontend.load import MAX_DIM
from tvmx.frontend.node import WIDENED

ShapeSpec = Mapping[str, Sequence[int | str | Dim]]


@dataclass(frozen=True)
class InputSpec:
    """One input after its shape is settled: ints, or names of symbolic dims."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


def bind_constants(model: ModelProto, constants: Mapping[str, Any], name: str) -> None:
    """Turn the inputs named in `constants` into initializers, in place.

    Raises ModelError for an unknown name, a value of another dtype kind or a contradicting shape.
    """
    graph = model.graph
    initial = {i.name: i for i in graph.initializer}
    inputs = {i.name: i for i in graph.input}
    for key, value in constants.items():
        if key not in inputs and key not in initial:
            raise ModelError(f"{name}: constants name {key!r}, which is no input: {_names(inputs)}")
        array = np.asarray(value)
        if key in inputs and inputs[key].type.HasField("tensor_type"):
            tensor_type = inputs[key].type.tensor_type
            want = helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
            if array.dtype != want:
                if not np.can_cast(array.dtype, want, "same_kind") and array.dtype.kind != "f":
                    raise ModelError(f"{name}: constant {key!r} is {array.dtype}, the model wants {want}")
                cast = array.astype(want)
                if not np.array_equal(cast.astype(array.dtype), array, equal_nan=False):
                    raise ModelError(f"{name}: constant {key!r} does not fit into {want}")
                array = cast
            if tensor_type.HasField("shape"):
                dims = [d.dim_value for d in tensor_type.shape.dim]
                if len(dims) != array.ndim or any(d > 0 and d != s for d, s in zip(dims, array.shape)):
                    raise ModelError(
                        f"{name}: constant {key!r} has shape {array.shape}, the model declares "
                        f"{tuple(d or '?' for d in dims)}"
                    )
        if key in initial:
            graph.initializer.remove(initial[key])
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), key))
    # An initializer that is also an input is a default value; here it becomes a plain constant.
    bound = {i.name for i in graph.initializer}
    kept = [i for i in graph.input if i.name not in bound]
    del graph.input[:]
    graph.input.extend(kept)


def _names(inputs: Mapping[str, Any]) -> str:
    return "the inputs are " + ", ".join(map(repr, inputs)) if inputs else "it has no inputs"


# What expressions over dims call.
RESERVED = ("min", "max")


def identifier(text: str, fallback: str) -> str:
    """A Python identifier close to `text` (`p2o.DynamicDimension.0` → `p2o_DynamicDimension_0`)."""
    clean = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_")
    if not clean:
        clean = fallback
    if clean[0].isdigit():
        return f"d{clean}"
    return f"{clean}_" if keyword.iskeyword(clean) or clean in RESERVED else clean


def settle_shapes(model: ModelProto, shapes: ShapeSpec, name: str) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Write the settled shapes into `model`, drop stale shape information, return them.

    A dim that neither the model nor `shapes` fixes stays symbolic. A dim name of the model that
    `shapes` fixes at one input is fixed at all of them.
    """
    graph = model.graph
    inputs = {i.name: i for i in graph.input}
    for key in shapes:
        if key not in inputs:
            raise ModelError(f"{name}: shapes name {key!r}, which is no input: {_names(inputs)}")
    bounds: dict[str, Dim] = {}
    fixed: dict[str, int | str] = {}  # dim_param of the model → what the user gave for it
    for key, given in shapes.items():
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ModelError(f"{name}: the shape of input {key!r} is {given!r}; give a tuple such as (1, 3, 224, 224)")
        declared = _declared(inputs[key], name)
        if declared is not None and len(declared) != len(given):
            raise ModelError(
                f"{name}: input {key!r} has rank {len(declared)} ({_show(declared)}), but "
                f"{len(given)} dims are given; use {_example(key, declared)}"
            )
        for axis, dim in enumerate(given):
            value = _given_dim(dim, bounds, key, name)
            old = declared[axis] if declared is not None else ""
            if isinstance(old, int):
                if value != old:
                    raise ModelError(
                        f"{name}: input {key!r} has dim {axis} fixed to {old} in the model, but "
                        f"{value} is given; use {_example(key, declared or ())}"
                    )
            elif old:
                if fixed.setdefault(old, value) != value:
                    raise ModelError(
                        f"{name}: dim {old!r} of the model is given as {fixed[old]} and as {value} "
                        f"(input {key!r}); give one value"
                    )
    specs = []
    for key, info in inputs.items():
        declared = _declared(info, name)
        if declared is None and key not in shapes:
            raise ModelError(
                f"{name}: input {key!r} has no shape in the model; give one: "
                f"--shape {key}=1,3,224,224 or shapes={{{key!r}: (1, 3, 224, 224)}}"
            )
        if key in shapes:
            shape = [_given_dim(d, bounds, key, name) for d in shapes[key]]
        else:
            assert declared is not None
            shape = []
            for axis, dim in enumerate(declared):
                if isinstance(dim, str):
                    dim = fixed.get(dim, identifier(dim, f"{identifier(key, 'x')}_d{axis}"))
                shape.append(dim)
        for dim in shape:
            if isinstance(dim, str):
                bounds.setdefault(dim, Dim(dim))
        tensor_type = info.type.tensor_type
        tensor_type.shape.Clear()
        for dim in shape:
            entry = tensor_type.shape.dim.add()
            if isinstance(dim, int):
                entry.dim_value = dim
            else:
                entry.dim_param = dim
        dtype = helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
        specs.append(InputSpec(key, tuple(shape), str(dtype)))
    # What was inferred for other shapes must not steer folding and conversion now.
    del graph.value_info[:]
    for out in graph.output:
        if out.name in inputs:  # one value to onnx_ir, with the output's type
            out.type.CopyFrom(inputs[out.name].type)
        elif out.type.HasField("tensor_type"):
            out.type.tensor_type.ClearField("shape")
    used = {d for s in specs for d in s.shape if isinstance(d, str)}
    return specs, {k: v for k, v in bounds.items() if k in used}


def _declared(info: ValueInfoProto, name: str) -> list[int | str] | None:
    """The model's own dims; "" is an unnamed unknown one; None is an unknown rank."""
    if not info.type.HasField("tensor_type"):
        kind = info.type.WhichOneof("value") or "untyped"
        raise ModelError(f"{name}: input {info.name!r} is a {kind.removesuffix('_type')}; only tensors are supported")
    tensor_type = info.type.tensor_type
    if tensor_type.elem_type in (0, 8):  # UNDEFINED, STRING
        kind = "string" if tensor_type.elem_type else "untyped"
        raise ModelError(f"{name}: input {info.name!r} is a {kind} tensor; these are not supported")
    dtype = helper.tensor_dtype_to_np_dtype(tensor_type.elem_type).name
    if dtype in WIDENED or dtype in ("float8_e8m0fnu", "complex64", "complex128"):
        raise ModelError(f"{name}: input {info.name!r} is {dtype}, which is not supported as input")
    if not tensor_type.HasField("shape"):
        return None
    dims: list[int | str] = []
    for d in tensor_type.shape.dim:
        if d.HasField("dim_value") and d.dim_value >= 0:
            dims.append(int(d.dim_value))
        else:
            dims.append(d.dim_param if d.dim_param not in ("?", "-1") else "")
    return dims


def _given_dim(dim: int | str | Dim, bounds: dict[str, Dim], key: str, name: str) -> int | str:
    if isinstance(dim, Dim):
        old = bounds.setdefault(dim.name, dim)
        if old != dim and old != Dim(dim.name):
            raise ModelError(f"{name}: dim {dim.name!r} has two bounds: {old} and {dim}")
        bounds[dim.name] = dim
        return dim.name
    if isinstance(dim, str):
        if dim != identifier(dim, ""):
            raise ModelError(f"{name}: input {key!r}: {dim!r} cannot name a dim; use a name such as N or batch_size")
        bounds.setdefault(dim, Dim(dim))
        return dim
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not 0 <= dim <= MAX_DIM:
        raise ModelError(f"{name}: input {key!r}: {dim!r} is no dim; use a number, a name or a Dim")
    return int(dim)


def _show(dims: Sequence[int | str]) -> str:
    return ",".join(str(d) if d != "" else "?" for d in dims)


def _example(key: str, dims: Sequence[int | str]) -> str:
    return f"--shape {key}=" + ",".join(str(d) if isinstance(d, int) and d else "1" for d in dims)
