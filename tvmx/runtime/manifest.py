"""The manifest of an artifact as data, checked field by field: a hostile file gives an ArtifactError, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tvmx.errors import ArtifactError
from tvmx.runtime.arena import ArenaBuffer

FORMAT = 1
ABI = 1


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape (an int, or an expression over symbolic dims) and dtype name of a model input or output."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Tensor:
    """One tensor of the program. `offset` is a constant's place among the parameters.

    `alias_of` is the tensor whose bytes it shares, from `alias_offset` on.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str
    alias_of: str | None
    bytes: int | str
    offset: int | None
    alias_offset: int | str = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a node on a CUDA device; `shared` is its dynamic shared memory in bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


@dataclass(frozen=True)
class StreamFacts:
    """How an entry of a CUDA library is spread over streams.

    `steps` are (launch | record | wait, stream, node or event); `tasks` are, a node, the seconds and the share of the
    device that were estimated, and the nodes that it waits for.
    """

    count: int
    events: int
    steps: tuple[tuple[str, int, int], ...]
    tasks: tuple[tuple[float, float, tuple[int, ...]], ...]


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel's machine code: places (offset, size) in the device section, and what it uses of a device."""

    name: str
    program: str
    cubin: tuple[int, int]
    ptx: tuple[int, int]
    registers: int
    stack: int
    spills: int
    shared: int
    threads: int


@dataclass(frozen=True)
class DeviceFacts:
    """What a CUDA library was compiled for: compute capability (80 for 8.0), and whether it runs on that one alone."""

    sm: int
    arch: str
    exact: bool
    kernels: tuple[DeviceKernel, ...]


@dataclass(frozen=True)
class Node:
    """One kernel call. `rule` tells the schedule: `cpu.conv2d`, or `tuned:cpu.conv2d`."""

    name: str
    kernel: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int
    rule: str
    launches: tuple[Launch, ...] = ()  # CUDA targets only


@dataclass(frozen=True)
class Check:
    """Values of input `input` must lie in [low, high]: `node` uses them as indices."""

    input: str
    low: int
    high: int
    node: str


@dataclass(frozen=True)
class Arena:
    """Buffers to place; `offsets`, `bytes` and `lower_bound` are None when sizes are symbolic."""

    buffers: tuple[ArenaBuffer, ...]
    offsets: dict[str, int] | None
    bytes: int | None
    lower_bound: int | None
    unshared_bytes: int | None
    planner: str | None


@dataclass(frozen=True)
class Entry:
    """One entry point. `values` are the expressions whose results the host function takes."""

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    output_tensors: tuple[str, ...]
    dims: dict[str, tuple[int, int | None]]
    checks: tuple[Check, ...]
    values: tuple[str, ...]
    guards: tuple[tuple[int | str, int | str], ...]  # dims that must be equal
    tensors: dict[str, Tensor]
    nodes: tuple[Node, ...]
    arena: Arena
    streams: StreamFacts | None = None  # CUDA targets only


@dataclass(frozen=True)
class Branch:
    """An entry that is three others: the one bool of `condition` says whether `then` or `otherwise` runs.

    One of the two may be None, a branch that no program could be made of, for `reason`.
    """

    node: str
    condition: str
    then: str | None
    otherwise: str | None
    reason: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The entries that there are."""
        return tuple(p for p in (self.condition, self.then, self.otherwise) if p is not None)


@dataclass(frozen=True)
class Manifest:
    """What a library says of itself."""

    tvmx: str
    tvm: str
    executor: str
    reason: str | None
    target: str
    arch: str
    features: frozenset[str]
    threads: int
    parameter_bytes: int
    entries: dict[str, Entry]
    branches: dict[str, Branch]
    raw: dict[str, Any]
    device: DeviceFacts | None = None  # CUDA targets only

    @property
    def public_entries(self) -> tuple[str, ...]:
        """Entry points to choose from: those that are no part of a branch, and the branches."""
        parts = {p for b in self.branches.values() for p in b.parts}
        return tuple(n for n in (*self.branches, *self.entries) if n not in parts)

    def signature(self, name: str) -> Entry:
        """The entry that has the inputs and outputs of public entry `name`."""
        while name in self.branches:
            name = self.branches[name].parts[1]
        return self.entries[name]


def read_manifest(data: bytes, path: str) -> Manifest:
    """Parse and check. Raises ArtifactError saying which file and what is wrong."""
    try:
        raw = json.loads(data)
        found = int(raw["format"]), int(raw["abi"])
        if found != (FORMAT, ABI):
            raise ArtifactError(
                f"{path} has manifest format {found[0]}, ABI {found[1]}; this runtime reads {FORMAT}, {ABI}: "
                "compile the model again, or install the tvmx that wrote it "
                f"({raw.get('tvmx', 'unknown')})"
            )
        target = raw["target"]
        return Manifest(
            tvmx=str(raw["tvmx"]),
            tvm=str(raw["tvm"]),
            executor=_one_of(raw["executor"], "graph", "vm", "cuda"),
            reason=None if raw["reason"] is None else str(raw["reason"]),
            target=str(target["name"]),
            arch=str(target["arch"]),
            features=frozenset(map(str, target["features"])),
            threads=int(target["threads"]),
            parameter_bytes=int(raw["parameter_bytes"]),
            entries={str(n): _entry(str(n), e) for n, e in raw["entries"].items()},
            branches=_branches(raw["branches"], {*raw["entries"], *raw["branches"]}),
            raw=raw,
            device=_device(raw["cuda"]) if raw["executor"] == "cuda" else None,
        )
    except ArtifactError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} has a damaged manifest ({type(error).__name__}: {error}); compile it again"
        ) from None


def _branches(raw: dict[str, Any], known: set[str]) -> dict[str, Branch]:
    def part(given: Any) -> str | None:
        return None if given is None else _one_of(given, *known)

    branches = {
        str(name): Branch(
            str(b["node"]),
            _one_of(b["condition"], *known),
            part(b["then"]),
            part(b["otherwise"]),
            str(b.get("reason", "")),
        )
        for name, b in raw.items()
    }
    if any(len(b.parts) < 2 for b in branches.values()):
        raise ValueError("a branch without any program")
    for name in branches:  # a hostile manifest must not send the executor round in circles
        path, todo = {name}, [branches[name]]
        while todo:
            branch = todo.pop()
            for inner in branch.parts:
                if inner == name or len(path) > len(branches) + len(known):
                    raise ValueError(f"branch {name!r} contains itself")
                if inner in branches and inner not in path:
                    path.add(inner)
                    todo.append(branches[inner])
    return branches


def _entry(name: str, raw: dict[str, Any]) -> Entry:
    arena = raw["arena"]
    return Entry(
        name=name,
        inputs=tuple(_info(i) for i in raw["inputs"]),
        outputs=tuple(_info(o) for o in raw["outputs"]),
        output_tensors=tuple(str(o["tensor"]) for o in raw["outputs"]),
        dims={str(k): (int(v[0]), None if v[1] is None else int(v[1])) for k, v in raw["dims"].items()},
        checks=tuple(Check(str(c["input"]), int(c["low"]), int(c["high"]), str(c["node"])) for c in raw["checks"]),
        values=tuple(map(str, raw["values"])),
        guards=tuple((_dim(a), _dim(b)) for a, b in raw["guards"]),
        tensors={
            str(t["name"]): Tensor(
                str(t["name"]),
                _shape(t["shape"]),
                str(t["dtype"]),
                str(t["kind"]),
                None if t["alias_of"] is None else str(t["alias_of"]),
                _dim(t["bytes"]),
                None if t.get("offset") is None else int(t["offset"]),
                _dim(t.get("alias_offset", 0)),
            )
            for t in raw["tensors"]
        },
        nodes=tuple(
            Node(
                str(n["name"]),
                str(n["kernel"]),
                str(n["op"]),
                tuple(map(str, n["inputs"])),
                tuple(map(str, n["outputs"])),
                int(n["flops"]),
                str(n["rule"]),
                tuple(Launch(str(l[0]), _triple(l[1]), _triple(l[2]), int(l[3])) for l in n.get("launches", ())),
            )
            for n in raw["nodes"]
        ),
        arena=Arena(
            buffers=tuple(
                ArenaBuffer(str(b[0]), int(b[1]), int(b[2]), _dim(b[3]), None if b[4] is None else str(b[4]))
                for b in arena["buffers"]
            ),
            offsets=None if arena["offsets"] is None else {str(k): int(v) for k, v in arena["offsets"].items()},
            bytes=_optional(arena["bytes"]),
            lower_bound=_optional(arena["lower_bound"]),
            unshared_bytes=_optional(arena["unshared_bytes"]),
            planner=None if arena["planner"] is None else str(arena["planner"]),
        ),
        streams=_streams(raw["streams"], len(raw["nodes"])) if "streams" in raw else None,
    )


def _streams(raw: dict[str, Any], nodes: int) -> StreamFacts:
    steps = tuple((_one_of(s[0], "launch", "record", "wait"), int(s[1]), int(s[2])) for s in raw["steps"])
    tasks = tuple((float(t[0]), float(t[1]), tuple(map(int, t[2]))) for t in raw["tasks"])
    count, events = int(raw["count"]), int(raw["events"])
    if len(tasks) != nodes or any(not 0 <= a < i for i, t in enumerate(tasks) for a in t[2]):
        raise ValueError("its tasks are not those of its nodes")
    for what, stream, index in steps:
        if not 0 <= stream < count or not 0 <= index < (nodes if what == "launch" else events):
            raise ValueError(f"step {what} {index} on stream {stream} names what does not exist")
    return StreamFacts(count, events, steps, tasks)


def _device(raw: dict[str, Any]) -> DeviceFacts:
    kernels = tuple(
        DeviceKernel(
            str(k["name"]), str(k["program"]), _pair(k["cubin"]), _pair(k["ptx"]), int(k["registers"]),
            int(k["stack"]), int(k["spills"]), int(k["shared"]), int(k["threads"]),
        )
        for k in raw["kernels"]
    )  # fmt: skip
    return DeviceFacts(int(raw["sm"]), str(raw["arch"]), bool(raw["exact"]), kernels)


def _pair(raw: Any) -> tuple[int, int]:
    first, second = raw
    return int(first), int(second)


def _triple(raw: Any) -> tuple[int, int, int]:
    x, y, z = raw
    return int(x), int(y), int(z)


def _info(raw: dict[str, Any]) -> TensorInfo:
    return TensorInfo(str(raw["name"]), _shape(raw["shape"]), str(raw["dtype"]))


def _shape(raw: list[Any]) -> tuple[int | str, ...]:
    return tuple(_dim(d) for d in raw)


def _dim(raw: Any) -> int | str:
    if type(raw) is int:
        if raw < 0:
            raise ValueError(f"negative dimension {raw}")
        return raw
    if type(raw) is str:
        return raw
    raise TypeError(f"dimension {raw!r}")


def _optional(raw: Any) -> int | None:
    return None if raw is None else int(raw)


def _one_of(raw: Any, *allowed: str) -> str:
    if raw not in allowed:
        raise ValueError(f"{raw!r} is not one of {allowed}")
    return str(raw)
