"""Second moments of what each layer reads: how the errors of its weights add up in its result.

A layer's result is y = W x for the column x that each position reads (a patch for a convolution). An error D in W
makes the mean squared error tr(D M D^T) of y, M the mean of x x^T, which rounding.py makes small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from onnx import NodeProto

from tvmx.quantize.graph import Array, OnnxGraph, attribute
from tvmx.quantize.placement import Layer
from tvmx.quantize.qparams import QWeight

COLUMNS_PER_RUN = 256
COLUMNS = 4096  # of one layer in all; then it is known well enough
RUNS = 128  # that are looked at where each has few columns
MAX_BLOCK = 512  # longest column whose full matrix is kept; longer ones are cut, correlations between blocks dropped
MIN_BLOCK = 16
LARGEST = 5e17  # of a column's elements: sums of squares stay in float32


@dataclass(frozen=True)
class Columns:
    """How a weight is read as matrices: `groups` × `blocks` of [rows, length], each with columns of its own.

    `rows_first`: the weight is [rows, length] (convolutions, a Gemm's transposed B), else [length, rows].
    """

    groups: int
    blocks: int
    length: int
    rows_first: bool

    def split(self, weight: Array) -> Array:
        """The weight as [groups * blocks, rows, length]."""
        flat = weight.reshape(len(weight), -1) if self.rows_first else weight.T
        parts = flat.reshape(self.groups, -1, self.blocks, self.length).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(parts.reshape(self.groups * self.blocks, -1, self.length))

    def join(self, parts: Array, shape: tuple[int, ...]) -> Array:
        """The weight of that shape from what `split` made."""
        rows = parts.shape[1]
        flat = parts.reshape(self.groups, self.blocks, rows, self.length).transpose(0, 2, 1, 3)
        flat = flat.reshape(self.groups * rows, self.blocks * self.length)
        return np.ascontiguousarray((flat if self.rows_first else flat.T).reshape(shape))


@dataclass
class Moments:
    """Sums over `count` columns x, each cut in groups × blocks: `first` [g, length] of x, `second` [g, l, l] of x x^T.

    `rounded`: the weight as rounded by them before, for the next draft of the same model.
    """

    columns: Columns
    count: int
    first: Array
    second: Array
    rounded: QWeight | None = None

    def mean(self) -> Array:
        """[groups * blocks, length]."""
        return self.first / max(self.count, 1)

    def matrix(self, centred: bool) -> Array:
        """The mean of x x^T, of x - mean when `centred`: what is left once a bias has taken off the mean error."""
        matrix = self.second / max(self.count, 1)
        if centred:
            mean = self.mean()
            matrix = matrix - mean[:, :, None] * mean[:, None, :]
        return np.asarray(matrix)


@dataclass
class MomentCollector:
    """Gathers the moments of every layer with a constant weight, a few columns of each of the first runs."""

    graph: OnnxGraph
    layers: dict[str, tuple[NodeProto, Columns]]
    found: dict[str, Moments] = field(default_factory=dict)
    runs: int = 0
    _waiting: dict[str, list[Array]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: OnnxGraph, layers: tuple[Layer, ...]) -> MomentCollector:
        """For those of `layers` whose columns are known."""
        chosen = {}
        for layer in layers:
            columns = _columns(graph, layer)
            if columns is not None:
                chosen[layer.name] = graph.nodes[layer.node], columns
        return cls(graph, chosen)

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Tensor → the layers that read it."""
        readers: dict[str, list[str]] = {}
        for layer, (node, _) in self.layers.items():
            readers.setdefault(node.input[0], []).append(layer)
        return readers

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that `update` wants to see."""
        return tuple(self._readers)

    def update(self, name: str, values: Array, channels_last: bool) -> None:
        """Take in a tensor of `tensors` from the run of number `runs`, which the caller counts."""
        for layer in self._readers.get(name, ()):
            node, columns = self.layers[layer]
            waiting = self._waiting.setdefault(layer, [])
            known = self.found.get(layer)
            if self.runs >= RUNS or (known is not None and known.count >= COLUMNS):
                continue
            parts = self._sample(node, columns, np.moveaxis(values, -1, 1) if channels_last else values)
            if np.abs(parts).max(initial=0) <= LARGEST:  # not so for NaN
                waiting.append(parts)
            if sum(map(len, waiting)) >= COLUMNS_PER_RUN:
                self._add(layer)

    def finish(self) -> dict[str, Moments]:
        """The moments of all that was seen, by layer."""
        for layer in self._waiting:
            self._add(layer)
        return self.found

    def _add(self, layer: str) -> None:
        """Take in the columns that wait: a product of many costs little more than one of few."""
        if not self._waiting[layer]:
            return
        columns = self.layers[layer][1]
        parts = np.concatenate(self._waiting[layer])
        self._waiting[layer] = []
        known = self.found.get(layer)
        if known is None:
            size = columns.groups * columns.blocks, columns.length
            known = Moments(columns, 0, np.zeros(size), np.zeros((*size, columns.length)))
            self.found[layer] = known
        turned = parts.transpose(1, 2, 0)
        known.count += len(parts)
        known.first += parts.sum(0, dtype=np.float64)
        known.second += turned @ turned.transpose(0, 2, 1)

    def _sample(self, node: NodeProto, columns: Columns, values: Array) -> Array:
        """[positions, groups * blocks, length] of a layer's input, as float32."""
        rng = np.random.default_rng(self.runs)
        if node.op_type == "Conv":
            weight = self.graph.shape(node.input[1]) or ()
            found = _patches(node, tuple(int(d) for d in weight[2:]), values, rng)
        else:
            rows = values.reshape(-1, values.shape[-1])
            found = rows[_choose(len(rows), rng)]
        return np.ascontiguousarray(found, np.float32).reshape(len(found), -1, columns.length)


def _columns(graph: OnnxGraph, layer: Layer) -> Columns | None:
    """How the layer's weight meets its input; None for what is not a plain product with a constant matrix."""
    node = graph.nodes[layer.node]
    if layer.weight != 1:
        return None
    shape = tuple(int(d) for d in graph.shape(node.input[1]) or ())
    if node.op_type == "Conv":
        length = int(np.prod(shape[1:]))
        return _blocks(int(attribute(node, "group", 1)), length, rows_first=True)
    if node.op_type == "MatMul" and len(shape) == 2:
        return _blocks(1, shape[0], rows_first=False)
    if node.op_type == "Gemm" and not attribute(node, "transA", 0):
        turned = bool(attribute(node, "transB", 0))
        return _blocks(1, shape[1 if turned else 0], rows_first=turned)
    return None


def _blocks(groups: int, length: int, rows_first: bool) -> Columns | None:
    """The fewest equal blocks of at most MAX_BLOCK."""
    for blocks in range(1, length + 1):
        if length % blocks == 0 and length // blocks <= MAX_BLOCK:
            fine = blocks == 1 or length // blocks >= MIN_BLOCK
            return Columns(groups, blocks, length // blocks, rows_first) if fine else None
    return None


def _choose(total: int, rng: np.random.Generator) -> Array:
    if total <= COLUMNS_PER_RUN:
        return np.arange(total)
    return rng.choice(total, COLUMNS_PER_RUN, replace=False)


def _patches(node: NodeProto, kernel: tuple[int, ...], x: Array, rng: np.random.Generator) -> Array:
    """[positions, channels, taps] that a convolution reads at some of its output positions; x is [N, C, ...]."""
    spatial = x.shape[2:]
    strides = attribute(node, "strides", None) or [1] * len(kernel)
    dilations = attribute(node, "dilations", None) or [1] * len(kernel)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    pads = list(_pads(node, spatial, strides, reach))
    counts = [(n + a + b - r) // s + 1 for n, (a, b), r, s in zip(spatial, pads, reach, strides)]
    chosen = np.unravel_index(_choose(int(np.prod([len(x), *counts])), rng), (len(x), *counts))
    taps = np.indices(kernel).reshape(len(kernel), -1)
    index: list[Array] = []
    inside = np.ones((len(chosen[0]), taps.shape[1]), bool)
    for k, size in enumerate(spatial):
        place = chosen[k + 1][:, None] * strides[k] - pads[k][0] + taps[k] * dilations[k]
        inside &= (place >= 0) & (place < size)
        index.append(np.clip(place, 0, size - 1))
    everywhere = np.moveaxis(x, 1, -1)
    values = everywhere[tuple([chosen[0][:, None], *index])]  # [positions, taps, channels]
    values = np.where(inside[:, :, None], values, np.float32(0))
    return np.asarray(values.transpose(0, 2, 1))


def _pads(node: NodeProto, spatial: tuple[int, ...], strides: list[int], reach: list[int]) -> Iterator[tuple[int, int]]:
    """(before, after) of each spatial axis, `auto_pad` resolved."""
    auto = attribute(node, "auto_pad", "NOTSET")
    given = attribute(node, "pads", None) or [0] * (2 * len(spatial))
    for k, size in enumerate(spatial):
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            whole = max(0, (-(-size // strides[k]) - 1) * strides[k] + reach[k] - size)
            small, large = whole // 2, whole - whole // 2
            yield (small, large) if auto == "SAME_UPPER" else (large, small)
        else:
            yield (0, 0) if auto == "VALID" else (given[k], given[k + len(spatial)])
