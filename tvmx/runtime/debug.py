"""Every intermediate of a run, copied out as it is made: the arena's bytes are reused later in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tvmx.runtime.dims import evaluate
from tvmx.runtime.dtypes import numpy_dtype
from tvmx.runtime.library import AfterNode
from tvmx.runtime.manifest import Tensor
from tvmx.runtime.slots import Array

if TYPE_CHECKING:
    from tvmx.runtime.cuda_program import CudaProgram
    from tvmx.runtime.program import GraphProgram


def debug_program(program: GraphProgram | CudaProgram) -> dict[str, Array]:
    """Run once; tensor name → array for each output of each node, and for the views of these and of inputs."""
    entry = program.entry
    found: dict[str, Array] = {}
    views: dict[str, list[str]] = {}
    for tensor in entry.tensors.values():
        views.setdefault(_owner(program, tensor.name), []).append(tensor.name)
    failures: list[BaseException] = []

    def after(context: Any, node: int) -> None:
        try:
            for output in entry.nodes[node].outputs:
                for name in views[_owner(program, output)]:
                    found[name] = _read(program, entry.tensors[name])
        except BaseException as error:  # must not unwind through C
            failures.append(error)

    callback = AfterNode(after)
    program.hooked(callback)
    if failures:
        raise failures[0]
    for info in entry.inputs:
        for name in views.get(info.name, ()):
            if name != info.name:
                found[name] = _read(program, entry.tensors[name])
    return found


def _owner(program: GraphProgram | CudaProgram, name: str) -> str:
    while (parent := program.entry.tensors[name].alias_of) is not None:
        name = parent
    return name


def _read(program: GraphProgram | CudaProgram, tensor: Tensor) -> Array:
    dtype = numpy_dtype(tensor.dtype)
    shape = tuple(evaluate(d, program.dims) for d in tensor.shape)
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    raw = program.read(tensor.name, count * dtype.itemsize)
    array: Array = np.frombuffer(raw, dtype).reshape(shape).copy()
    return array
