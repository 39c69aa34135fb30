"""Graph → the C source of its host function: one block a kernel call, in order, nothing looked up while running.

A tensor lies in an input, an output, the arena or the parameters. Symbolic dims and offsets come in an int64 table
(`values`), filled by the runtime once a shape signature, so that no size is computed in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvmx.executor.lifetimes import dtype_bytes, tensor_bytes
from tvmx.graph import COPY, Graph, Node, Shape

PRELUDE = """\
#include <string.h>
#include "tvmx_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define LIKELY_NULL(x) __builtin_expect((x) != 0, 0)

/* DLTensor and TVMFFIAny, as the kernels read them. */
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} tensor;
typedef struct {
  int32_t type_index;
  uint32_t zero;
  union {
    int64_t i;
    void* p;
  };
} any;
#define INT_ARG(x) {1, 0, {.i = (x)}}
#define TENSOR_ARG(x) {7, 0, {.p = &(x)}}
#define CPU 1

void tvmx_pool_rouse(tvmx_pool* pool);

static inline int done(const tvmx_call* call, int node) {
  if (LIKELY_NULL(call->ticks)) call->ticks[node + 1] = tvmx_ticks();
  if (LIKELY_NULL(call->after)) call->after(call->after_context, node);
  return 0;
}
"""

_CODES = {"int": 0, "uint": 1, "float": 2, "handle": 3, "bfloat": 4, "bool": 6}


@dataclass
class ValueTable:
    """The int64 values that the host function takes: distinct dimension expressions, then arena offsets."""

    expressions: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # arena buffer -> position after the expressions

    def dim(self, d: int | str) -> str:
        if isinstance(d, int):
            return str(d)
        return f"v[{self.expressions.setdefault(d, len(self.expressions))}]"


@dataclass(frozen=True)
class HostSource:
    """C source of one entry and the values it expects: `expressions`, then the offset of each of `offsets`."""

    source: str
    expressions: tuple[str, ...]
    offsets: tuple[str, ...]


def host_source(
    graph: Graph,
    entry: str,
    symbols: Mapping[str, str],
    arena_offsets: Mapping[str, int] | None,
    constant_offsets: Mapping[str, int],
    arena_owners: tuple[str, ...],
    parallel: bool,
) -> HostSource:
    """The host function `tvmx_run_<entry>`.

    `symbols` maps a kernel of the graph to its linked symbol. `arena_offsets` gives bytes for a static program and
    is None for a symbolic one, whose offsets are passed in; `arena_owners` are the tensors with storage there.
    `parallel` says that some kernel uses the thread pool.
    """
    table = ValueTable()
    # Offsets follow the expressions, and those are only known when the body is printed: offsets have their own base.
    order = {name: i for i, name in enumerate(arena_owners)}

    def address(name: str) -> str:
        owner, inner = graph.storage(name), graph.offset(name)
        return base(owner) if inner == 0 else f"(char*){base(owner)} + {table.dim(inner)}"

    def base(owner: str) -> str:
        kind = graph.tensors[owner].kind
        if kind == "input":
            return f"in[{graph.inputs.index(owner)}]"
        if kind == "output":
            return f"out[{graph.outputs.index(owner)}]"
        if kind == "constant":
            return f"params + {constant_offsets[owner]}"
        if arena_offsets is not None:
            return f"arena + {arena_offsets[owner]}"
        return f"arena + off[{order[owner]}]"

    body = [_node_block(graph, node, index, symbols, address, table) for index, node in enumerate(graph.nodes)]
    declared = sorted({symbols[n.kernel] for n in graph.nodes if n.kernel != COPY})
    expressions = tuple(table.expressions)
    lines = [
        *(f"int __tvm_ffi_{s}(void*, const any*, int32_t, any*);" for s in declared),
        "",
        f"static int body_{entry}(const tvmx_call* call) {{",
        "  void* const* in = call->inputs;",
        "  void* const* out = call->outputs;",
        "  char* arena = call->arena;",
        "  char* params = (char*)tvmx_params();",
        "  const int64_t* v = call->values;",
        f"  const int64_t* off = v + {len(expressions)};" if arena_offsets is None else "",
        "  (void)in, (void)out, (void)arena, (void)params, (void)v;",
        "  any result = {0};" if declared else "",
        "  if (LIKELY_NULL(call->ticks)) call->ticks[0] = tvmx_ticks();",
        *body,
        "  return 0;",
        "}",
        "",
        f"EXPORT int tvmx_run_{entry}(const tvmx_call* call) {{",
        "  tvmx_pool* before = tvmx_pool_enter(call->pool);",
        "  tvmx_pool_rouse(call->pool);" if parallel else "",
        f"  int status = body_{entry}(call);",
        "  tvmx_pool_enter(before);",
        "  return status;",
        "}",
        "",
    ]
    offsets = () if arena_offsets is not None else arena_owners
    return HostSource("\n".join(line for line in lines if line is not None), expressions, offsets)


def _node_block(graph, node: Node, index: int, symbols, address, table: ValueTable) -> str:  # type: ignore[no-untyped-def]
    title = f"  {{ /* {index}: {_comment(node.op or node.kernel)} */"
    if node.kernel == COPY:
        size = tensor_bytes(graph.tensors[node.outputs[0]])
        return (
            f"{title}\n    memcpy({address(node.outputs[0])}, {address(node.inputs[0])}, (size_t){table.dim(size)});"
            f"\n    done(call, {index});\n  }}"
        )
    lines, args = [title], []
    names = (*node.inputs, *node.outputs)
    for i, name in enumerate(names):
        tensor = graph.tensors[name]
        lines.append(_tensor_lines(f"t{i}", address(name), tensor.shape, tensor.dtype, table))
    scalars = [f"INT_ARG({table.dim(_as_dim(s))})" for s in node.scalars]
    tensors = [f"TENSOR_ARG(t{i})" for i in range(len(names))]
    n_in = len(node.inputs)
    args = [
        *tensors[:n_in],
        *scalars[: node.leading_scalars],
        *tensors[n_in:],
        *scalars[node.leading_scalars :],
    ]
    lines.append(f"    any a[] = {{{', '.join(args)}}};")
    lines.append(f"    if (__tvm_ffi_{symbols[node.kernel]}(0, a, {len(args)}, &result)) return {index + 1};")
    lines.append(f"    done(call, {index});\n  }}")
    return "\n".join(lines)


def _as_dim(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _tensor_lines(name: str, data: str, shape: Shape, dtype: str, table: ValueTable) -> str:
    code, bits = dtype_code(dtype)
    static = all(isinstance(d, int) for d in shape)
    dims = ", ".join(table.dim(d) for d in shape)
    storage = "static const int64_t" if static else "const int64_t"
    shape_line = f"    {storage} s_{name}[] = {{{dims}}};\n" if shape else ""
    pointer = f"s_{name}" if shape else "0"
    return f"{shape_line}    tensor {name} = {{{data}, CPU, 0, {len(shape)}, {code}, {bits}, 1, {pointer}, 0, 0}};"


def dtype_code(dtype: str) -> tuple[int, int]:
    """DLPack type code and bits."""
    if dtype == "bool":
        return _CODES["bool"], 8
    base = dtype.rstrip("0123456789")
    return _CODES.get(base, 1), 8 * dtype_bytes(dtype)


def _comment(text: str) -> str:
    return text.replace("*/", "* /").replace("/*", "/ *")
