"""What kind of operator makes each buffer of a memory plan: the colours of its picture."""

from __future__ import annotations

from tvmx.memory import Problem
from tvmx.runtime.manifest import Entry

# Words of an operator's name → kind; the first row with a word in it decides, so heavy operators come first.
WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("convolution", ("conv", "winograd")),
    ("matrix product", ("matmul", "dense", "gemm", "einsum")),
    ("normalisation", ("norm", "softmax")),
    ("pooling, reduction", ("pool", "mean", "sum", "reduce", "argm", "topk", "sort", "cum")),
    (
        "data movement",
        (
            "transpose", "permute", "concat", "pad", "slice", "split", "take", "gather", "scatter", "layout",
            "resize", "tile", "repeat", "broadcast", "copy", "flip", "stack", "reshape",
        ),
    ),
)  # fmt: skip
COLORS = {
    "convolution": "#8ecae6",
    "matrix product": "#f4a259",
    "normalisation": "#c8b6e2",
    "pooling, reduction": "#f2cc5c",
    "data movement": "#9fd8a4",
    "elementwise": "#f3a6b5",
    "buffer": "#8ecae6",
    "view": "#9fd8a4",
    "in place": "#f4a259",
    "pinned": "#c8b6e2",
}


def operator_kind(op: str) -> str:
    """ "conv2d+add+relu" → "convolution"."""
    for kind, words in WORDS:
        if any(word in op for word in words):
            return kind
    return "elementwise"


def node_kinds(entry: Entry) -> tuple[dict[str, str], dict[str, str]]:
    """(kind, operators) of each arena buffer of an entry: those of the call that writes it first."""
    kinds: dict[str, str] = {}
    operators: dict[str, str] = {}
    for node in entry.nodes:
        for name in node.outputs:
            while name not in kinds:
                kinds[name], operators[name] = operator_kind(node.op), node.op
                parent = entry.tensors[name].alias_of
                if parent is None:
                    break
                name = parent
    buffers = [b.id for b in entry.arena.buffers]
    return {id: kinds.get(id, "elementwise") for id in buffers}, {id: operators.get(id, "") for id in buffers}


def problem_kinds(problem: Problem) -> dict[str, str]:
    """Kinds of a problem that knows nothing of operators: how each buffer lies in memory."""

    def kind(id: str) -> str:
        b = problem[id]
        if b.alias_of is not None:
            return "view" if b.alias == "view" else "in place"
        return "pinned" if b.offset is not None else "buffer"

    return {b.id: kind(b.id) for b in problem}
