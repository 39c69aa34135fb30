"""Which operators are computed in integers, and which tensors are quantised for them.

The heavy operators (convolutions and products) decide; element-wise chains behind them are left alone, for they
become the epilogue of the kernel before; operators between heavy ones (residual additions, pools, concatenation,
reshapes) join when all they read comes from integer kernels and what they make goes into one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import NodeProto

from tvmx.quantize.graph import OnnxGraph, attribute, node_name
from tvmx.quantize.scheme import ResolvedScheme, check_overrides

HEAVY = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
# Integer kernels of their own that need a scale for what they read and one for what they make.
LIGHT = frozenset({"Add", "Mul", "AveragePool", "GlobalAveragePool"})
# What goes in comes out: one scale on both sides.
SAME_SCALE = frozenset({
    "Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Flatten", "Pad", "Split", "DepthToSpace",
    "SpaceToDepth", "MaxPool", "Concat", "Resize",
})  # fmt: skip
# Fused into the kernel before; in float, on accumulators that are there anyway.
UNARY = frozenset({
    "Relu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Tanh", "Erf",
    "Exp", "Log", "Sqrt", "Abs", "Neg", "Softplus", "Softsign", "Gelu", "Mish", "Swish", "Pow", "ThresholdedRelu",
    "Identity", "Round", "Floor", "Ceil", "Reciprocal",
})  # fmt: skip
BINARY = frozenset({"Add", "Sub", "Mul", "Div", "Min", "Max"})

NO_CANDIDATE = ""  # in place of a reason: nobody would expect this operator to be quantised

MAX_CONCAT_RATIO = 16.0  # of the greatest to the least range that one scale may serve


@dataclass(frozen=True)
class Layer:
    """One operator computed in integers. Positions are those of its inputs."""

    node: int
    name: str
    op: str
    activations: tuple[int, ...]
    weight: int | None = None  # a constant operand, quantised ahead of time
    weight_axis: int | None = None
    bias: int | None = None


@dataclass(frozen=True)
class WeightOnly:
    """A constant operand stored as int8 for an operator computed in float."""

    node: int
    name: str
    op: str
    weight: int
    weight_axis: int | None


@dataclass(frozen=True)
class Kept:
    """An operator that could be quantised and is not, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """Layers in graph order; `tensors`: activation → the tensor whose parameters it shares (often itself)."""

    layers: tuple[Layer, ...]
    weight_only: tuple[WeightOnly, ...]
    kept: tuple[Kept, ...]
    tensors: dict[str, str] = field(default_factory=dict)
    signed: frozenset[str] = frozenset()  # roots that must be symmetric int8: second operands of products
    rounded: frozenset[str] = frozenset()  # tensors that no integer kernel makes: rounding them is work of its own

    @property
    def roots(self) -> tuple[str, ...]:
        """The tensors that get parameters of their own."""
        return tuple(dict.fromkeys(self.tensors.values()))

    def members(self, root: str) -> list[str]:
        """The tensors that share `root`'s parameters."""
        return [name for name, owner in self.tensors.items() if owner == root]


def place(graph: OnnxGraph, scheme: ResolvedScheme, refuse: dict[str, str] | None = None) -> Placement:
    """Choose layers and tensors. `refuse` maps names of operators that stay in float to the reason.

    Raises ConfigError for an override that matches nothing.
    """
    return _Placer(graph, scheme, refuse or {}).run()


class _Placer:
    def __init__(self, graph: OnnxGraph, scheme: ResolvedScheme, refuse: dict[str, str]) -> None:
        self.graph = graph
        self.scheme = scheme
        self.refuse = refuse
        self.reasons: dict[int, str] = {}
        self.roots = _regions(graph)
        self.active: dict[int, Layer] = {}

    def run(self) -> Placement:
        options = self.scheme.scheme
        check_overrides(options.overrides, [(node_name(n), n.op_type) for n in self.graph.nodes])
        heavy = []
        for index, node in enumerate(self.graph.nodes):
            if node.op_type not in HEAVY | LIGHT | SAME_SCALE:
                continue
            found = self._candidate(index, node)
            if isinstance(found, str):
                if found != NO_CANDIDATE:
                    self.reasons[index] = found
                continue
            self.active[index] = found
            if node.op_type in HEAVY:
                heavy.append(index)
        for wanted, ends in ((options.keep_first is True, heavy[:1]), (options.keep_last, heavy[-1:])):
            for index in ends if wanted else ():
                self._drop(index, "the first or last layer stays in float by option")
        self._settle()
        layers = tuple(self.active[k] for k in sorted(self.active))
        weight_only = tuple(self._weight_only())
        quantized_elsewhere = {w.node for w in weight_only}
        kept = tuple(
            Kept(node_name(self.graph.nodes[k]), self.graph.nodes[k].op_type, reason)
            for k, reason in sorted(self.reasons.items())
            if k not in quantized_elsewhere
        )
        tensors = self._shared_scales(layers)
        rounded = frozenset(n for n in tensors if self.graph.producer.get(self.roots.root[n]) not in self.active)
        return Placement(layers, weight_only, kept, tensors, self._signed(layers, tensors), rounded)

    # candidates

    def _candidate(self, index: int, node: NodeProto) -> Layer | str:
        """The node as a layer, or why it cannot be one."""
        name = node_name(node)
        if node.domain not in ("", "ai.onnx"):
            return f"the domain {node.domain} is not known"
        said = self.scheme.scheme.precision_of(name, node.op_type)
        if said in ("float", "weight"):
            return f"an override says {said}"
        if name in self.refuse:
            return self.refuse[name]
        if not self.graph.is_float(node.input[0]) or not self.graph.is_float(node.output[0]):
            known = self.graph.types.get(node.output[0])
            return "it is not float32" if node.op_type in HEAVY or known is None else NO_CANDIDATE
        if node.op_type in HEAVY:
            return self._heavy(index, node, name)
        return self._joining(index, node, name)

    def _heavy(self, index: int, node: NodeProto, name: str) -> Layer | str:
        graph = self.graph
        if graph.is_constant(node.input[0]) and node.op_type != "MatMul":
            return "its first operand is a constant"
        if graph.is_constant(node.input[1]):
            if graph.is_constant(node.input[0]):
                return "both operands are constants"
            axis = weight_axis(graph, node, self.scheme.scheme.per_channel)
            bias = 2 if _integer_bias(graph, node) else None
            return Layer(index, name, node.op_type, (0,), 1, axis, bias)
        if node.op_type in ("Conv", "ConvTranspose"):
            return "its weight is computed at run time"
        if graph.is_constant(node.input[0]):  # constant A, computed B: A is the weight, per tensor
            return Layer(index, name, node.op_type, (1,), 0, None)
        return Layer(index, name, node.op_type, (0, 1))

    def _joining(self, index: int, node: NodeProto, name: str) -> Layer | str:
        graph = self.graph
        if node.op_type in ("Add", "Mul"):
            if index in self.roots.elementwise:
                return NO_CANDIDATE  # it becomes the epilogue of the kernel before
            return Layer(index, name, node.op_type, (0, 1))
        if node.op_type == "Concat":
            if any(graph.is_constant(i) for i in node.input):
                return "one of its parts is a constant"
            return Layer(index, name, node.op_type, tuple(range(len(node.input))))
        if graph.is_constant(node.input[0]):
            return NO_CANDIDATE
        if node.op_type == "Pad" and not _zero_pad(graph, node):
            return "it pads with something other than 0"
        if node.op_type == "Resize" and attribute(node, "mode", "nearest") == "cubic":
            return "cubic weights leave the range of the input"
        if node.op_type == "Resize" and attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
            return "it may extrapolate"
        if node.op_type == "MaxPool" and len([o for o in node.output if o]) > 1:
            return "its indices are used"
        return Layer(index, name, node.op_type, (0,))

    # what joins

    def _drop(self, index: int, reason: str) -> None:
        if self.active.pop(index, None) is not None:
            self.reasons[index] = reason

    def _settle(self) -> None:
        """Drop joining operators until each that is left stands between integer kernels."""
        changed = True
        while changed:
            changed = False
            read = self._read()
            for index, layer in list(self.active.items()):
                if layer.op in HEAVY:
                    continue
                node = self.graph.nodes[index]
                reason = self._lonely(node, layer, read)
                if reason is not None:
                    self._drop(index, reason)
                    changed = True
                    read = self._read()

    def _read(self) -> set[str]:
        """Tensors that an active layer reads as activation."""
        return {self.graph.nodes[k].input[i] for k, layer in self.active.items() for i in layer.activations}

    def _lonely(self, node: NodeProto, layer: Layer, read: set[str]) -> str | None:
        own = {node.input[i] for i in layer.activations}
        for name in own:
            if not self._from_integers(name, layer.node):
                return f"{name!r} does not come from an integer kernel"
        if not any(self._wanted(o, read) for o in node.output if o):
            return "no integer kernel reads its result"
        return None

    def _from_integers(self, name: str, reader: int) -> bool:
        root = self.roots.root[name]
        maker = self.graph.producer.get(root)
        if maker is not None and maker in self.active:
            return True
        return self._read_by_heavy(name)

    def _read_by_heavy(self, name: str) -> bool:
        """Whether a heavy layer has it quantised anyway."""
        return any(
            k in self.active and self.active[k].op in HEAVY and name in _activations(self.graph, self.active[k])
            for k in self.graph.consumers.get(name, ())
        )

    def _wanted(self, name: str, read: set[str]) -> bool:
        """Whether a layer reads the tensor, or what element-wise operators make of it alone."""
        if self.scheme.scheme.quantize_outputs and name in self.graph.outputs:
            return True
        return any(member in read for member in self.roots.members.get(self.roots.root[name], (name,)))

    # weights of operators in float

    def _weight_only(self) -> Iterator[WeightOnly]:
        options = self.scheme.scheme
        shared = {self.graph.nodes[k].input[la.weight] for k, la in self.active.items() if la.weight is not None}
        for index, node in enumerate(self.graph.nodes):
            if index in self.active or node.domain not in ("", "ai.onnx"):
                continue
            name = node_name(node)
            said = options.precision_of(name, node.op_type)
            if node.op_type == "Gather":
                if self._is_table(node) and said != "float" and (options.embeddings or said in ("int8", "weight")):
                    yield WeightOnly(index, name, node.op_type, 0, 0)
                continue
            if node.op_type not in HEAVY or len(node.input) < 2 or not self._float_constant(node.input[1]):
                continue
            wanted = said == "weight" or (options.prefer == "size" and said != "float")
            if wanted or node.input[1] in shared:
                axis = weight_axis(self.graph, node, options.per_channel)
                yield WeightOnly(index, name, node.op_type, 1, axis)

    def _is_table(self, node: NodeProto) -> bool:
        """Whether the node looks rows up in a constant float matrix large enough to matter."""
        if not self._float_constant(node.input[0]) or attribute(node, "axis", 0) != 0:
            return False
        shape = self.graph.shape(node.input[0]) or ()
        return len(shape) == 2 and int(shape[0]) * int(shape[1]) >= 4096

    def _float_constant(self, name: str) -> bool:
        return self.graph.is_constant(name) and self.graph.is_float(name)

    # parameters

    def _shared_scales(self, layers: tuple[Layer, ...]) -> dict[str, str]:
        """Every quantised tensor, and the one whose parameters it takes."""
        owner: dict[str, str] = {}

        def find(name: str) -> str:
            while owner[name] != name:
                name = owner[name]
            return name

        read = self._read()
        ends: dict[int, list[str]] = {}
        for layer in layers:
            node = self.graph.nodes[layer.node]
            for name in _activations(self.graph, layer):
                owner.setdefault(name, name)
            if layer.op in SAME_SCALE:
                outs = [o for o in node.output if o and (o in read or self._quantized_output(o))]
                ends[layer.node] = outs
        for layer in layers:
            if self.scheme.scheme.quantize_outputs:
                for name in self.graph.nodes[layer.node].output:
                    if name in self.graph.outputs:
                        owner.setdefault(name, name)
        # In graph order, so that the root is the tensor made first: what a view shows was computed there.
        for layer in layers:
            if layer.op not in SAME_SCALE:
                continue
            names = [*_activations(self.graph, layer), *ends[layer.node]]
            for name in names:
                owner.setdefault(name, name)
            if layer.op == "Concat" and ends[layer.node]:
                root = find(ends[layer.node][0])  # its range is the union of the parts'
                for name in names:
                    owner[find(name)] = root
            else:
                for name in names[1:]:
                    owner[find(name)] = find(names[0])
        return {name: find(name) for name in owner}

    def _quantized_output(self, name: str) -> bool:
        return self.scheme.scheme.quantize_outputs and name in self.graph.outputs

    def _signed(self, layers: tuple[Layer, ...], tensors: dict[str, str]) -> frozenset[str]:
        """Second operands of products stay symmetric int8: dot instructions take one unsigned operand."""
        seconds, firsts = set(), set()
        for layer in layers:
            node = self.graph.nodes[layer.node]
            if layer.op in ("MatMul", "Gemm") and 1 in layer.activations:
                seconds.add(tensors[node.input[1]])
            elif layer.op in HEAVY:
                firsts.add(tensors[node.input[0]])
        return frozenset(seconds - firsts)


def _activations(graph: OnnxGraph, layer: Layer) -> list[str]:
    return [graph.nodes[layer.node].input[i] for i in layer.activations]


@dataclass(frozen=True)
class _Regions:
    """Element-wise regions: `root[t]` is the tensor that t is computed from by element-wise operators alone."""

    root: dict[str, str]
    members: dict[str, list[str]]
    elementwise: frozenset[int]  # nodes inside a region: all they read has one root


def _regions(graph: OnnxGraph) -> _Regions:
    root: dict[str, str] = {name: name for name in (*graph.inputs, *graph.initializers)}
    inside = set()
    for index, node in enumerate(graph.nodes):
        outputs = [o for o in node.output if o]
        source: str | None = None
        if node.op_type in UNARY or node.op_type in BINARY:
            roots = {root.get(node.input[k], node.input[k]) for k in graph.dynamic_inputs(node)}
            if len(roots) == 1:
                source = roots.pop()
                inside.add(index)
        for name in outputs:
            root[name] = source or name
    members: dict[str, list[str]] = {}
    for name, owner in root.items():
        members.setdefault(owner, []).append(name)
    return _Regions(root, members, frozenset(inside))


def weight_axis(graph: OnnxGraph, node: NodeProto, per_channel: bool) -> int | None:
    """The output-channel axis of a constant operand, or None for one scale."""
    shape = graph.shape(node.input[1]) or ()
    if not per_channel or len(shape) < 2:
        return None
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return len(shape) - 1


def _integer_bias(graph: OnnxGraph, node: NodeProto) -> bool:
    """Whether the third input is a constant vector that can be added to the accumulator."""
    if node.op_type == "MatMul" or len(node.input) < 3 or not node.input[2]:
        return False
    if not graph.is_constant(node.input[2]) or not graph.is_float(node.input[2]):
        return False
    if node.op_type == "Gemm" and (attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0):
        return False
    if node.op_type == "ConvTranspose" and attribute(node, "group", 1) != 1:
        return False
    bias, weight = graph.shape(node.input[2]) or (), graph.shape(node.input[1]) or ()
    axis = weight_axis(graph, node, per_channel=True)
    return len(bias) == 1 and axis is not None and bias[0] == weight[axis]


def _zero_pad(graph: OnnxGraph, node: NodeProto) -> bool:
    mode = attribute(node, "mode", "constant")
    if mode != "constant":
        return True
    if len(node.input) < 3 or not node.input[2]:
        return True
    value = graph.constant(node.input[2])
    return value is not None and not value.any()
