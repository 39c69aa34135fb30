"""Scheduled TensorIR → CUDA source and the launches that run it. Needs neither a GPU nor a CUDA compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.errors import CompileError

PIPELINE = "tvmx_cuda"
"""Name of our TIR pipeline in TVM: `tvm.compile(mod, target, tir_pipeline=PIPELINE)`."""

PASS_CONFIG = {"tirx.use_async_copy": True}

AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Argument:
    """A kernel's pointer argument: the PrimFunc's tensor parameter (`index` ≥ 0) or workspace number -1 - index.

    With a `value` it is that number instead, a dim of a kernel whose shapes were symbolic.
    """

    index: int
    dtype: str
    shape: tuple[int, ...]
    value: int | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what the host does for it. `shared_bytes` is dynamic shared memory."""

    kernel: str
    arguments: tuple[Argument, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0

    @property
    def threads(self) -> int:
        x, y, z = self.block
        return x * y * z


@dataclass(frozen=True)
class DeviceProgram:
    """CUDA source of one PrimFunc, and its launches in order."""

    name: str
    source: str
    launches: tuple[Launch, ...]
    parameters: tuple[Argument, ...]  # the PrimFunc's tensors in order, outputs last


def install_pipeline() -> None:
    """Register our TIR pipeline with TVM under the name `PIPELINE`."""
    from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
    from tvm.tirx import compilation_pipeline

    def pipeline() -> Any:
        import tvm
        from tvm import tirx

        passes = [*device_passes(), tirx.transform.MakePackedAPI(), tirx.transform.BF16StorageLegalize()]
        return tvm.ir.transform.Sequential(passes), finalize_host_passes, finalize_device_passes

    compilation_pipeline.PIPELINE_MAP[PIPELINE] = pipeline


def device_passes() -> list[Any]:
    """TVM's lowering of scheduled TensorIR up to the split of host and device, with our async copies.

    StorageRewrite spares kernels with wmma fragments: it would merge fragments of different kinds.
    """
    from tvm import s_tir, tirx

    from tvmx.cuda.async_copy import inject_async_copy
    from tvmx.cuda.bool_vectors import unroll_bool_vectors
    from tvmx.cuda.permuted import compact_allocation, permute_shared
    from tvmx.cuda.vector_predicates import vector_predicates

    return [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.ManifestSharedMemoryLocalStage(),
        compact_allocation(),
        s_tir.transform.LowerAutoCopy(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.InjectPermutedLayout(),
        s_tir.transform.AnnotateIrregularLoop(),
        s_tir.transform.InjectSoftwarePipeline(),
        s_tir.transform.TransformMmaBufferLayout(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        s_tir.transform.LoopPartition(),
        vector_predicates(),
        unroll_bool_vectors(),
        tirx.transform.VectorizeLoop(True),
        s_tir.transform.InjectVirtualThread(),
        s_tir.transform.InjectDoubleBuffer(),
        _storage_rewrite(),
        s_tir.transform.LowerAsyncDMA(),
        s_tir.transform.HoistIfThenElse(),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.CommonSubexprElim(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        s_tir.transform.ThreadSync("shared"),
        s_tir.transform.ThreadSync("shared.dyn"),
        s_tir.transform.ThreadSync("warp"),
        s_tir.transform.InferFragment(),
        s_tir.transform.LowerThreadAllreduce(),
        permute_shared(),
        inject_async_copy(),
        s_tir.transform.MergeSharedMemoryAllocations(),
        tirx.transform.SplitHostDevice(),
    ]


def lower_kernel(func: Any, target: Any, name: str = "main") -> DeviceProgram:
    """One scheduled PrimFunc of static shape → its CUDA source and launches.

    `target` is a `tvmx.target.Target` of kind "cuda" (or what `tvm.target.Target` makes of it).
    Raises CompileError when it does not lower: a block outside every thread, a symbolic launch
    (`tvmx.cuda.symbolic` lowers those).
    """

    def argument(index: int, dtype: str, shape: Sequence[Any], value: Any) -> Argument:
        return Argument(index, dtype, tuple(_int(e, name) for e in shape), None if value is None else _int(value, name))

    def launch(kernel: str, arguments: Any, grid: Any, block: Any, shared: Any) -> Launch:
        gx, gy, gz = (_int(e, kernel) for e in grid)
        bx, by, bz = (_int(e, kernel) for e in block)
        return Launch(kernel, tuple(arguments), (gx, gy, gz), (bx, by, bz), _int(shared, kernel))

    source, launches, parameters = lowered(func, target, name, argument, launch)
    return DeviceProgram(name, source, tuple(launches), tuple(parameters))


def lowered(
    func: Any, target: Any, name: str, argument: Callable[..., Any], launch: Callable[..., Any]
) -> tuple[str, list[Any], list[Any]]:
    """(CUDA source, launches, parameters) of a scheduled PrimFunc; the latter are made by the functions given:
    `argument(index, dtype, shape, value)`, `launch(kernel, arguments, grid, block, shared)` of TIR expressions.

    Raises CompileError.
    """
    import tvm
    from tvm import tirx

    chosen = target.tvm() if hasattr(target, "tvm") else target
    chosen = chosen if chosen.host is not None else tvm.target.Target(chosen, host="llvm")
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    try:
        with chosen, tvm.transform.PassContext(opt_level=3, config=PASS_CONFIG):
            mod = tirx.transform.BindTarget(chosen)(mod)
            mod = tvm.ir.transform.Sequential(device_passes())(mod)
            host = mod[name]
            launches = _launches(host, argument, launch)
            device = _device_module(mod, name)
            source = mended(tvm.get_global_func("target.build.cuda")(device, chosen).inspect_source())
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"kernel {name!r} does not lower to CUDA: {_reason(error)}") from error
    buffers = [p for p in func.params if hasattr(p.ty, "shape")]
    return source, launches, [argument(i, str(b.dtype), b.shape, None) for i, b in enumerate(buffers)]


def _storage_rewrite() -> Any:
    import tvm
    from tvm import tirx

    from tvmx.schedule.tir import walk

    rewrite = tirx.transform.StorageRewrite()

    def has_fragments(func: Any) -> bool:
        scopes: list[str] = []
        walk(func.body, tirx.AllocBuffer, lambda a: scopes.append(str(a.buffer.scope())))
        return any(s.startswith("wmma.") for s in scopes)

    def run(mod: Any, _ctx: Any) -> Any:
        plain = tvm.IRModule({v: f for v, f in mod.functions.items() if not has_fragments(f)})
        done = rewrite(plain)
        return tvm.IRModule({v: done[v] if v in done.functions else f for v, f in mod.functions.items()})

    return tvm.transform.module_pass(run, opt_level=0, name="tvmx.StorageRewrite")


def _device_module(mod: Any, host: str) -> Any:
    import tvm
    from tvm import tirx
    from tvm.s_tir.pipeline import finalize_device_passes

    kernels = tvm.IRModule({v: f for v, f in mod.functions.items() if v.name_hint != host})
    if not kernels.functions:
        raise CompileError(f"kernel {host!r} has no device code: none of its loops is bound to threads")
    kernels = tirx.transform.BF16StorageLegalize()(kernels)
    return finalize_device_passes()(kernels)


_BYTE = r"\((?:signed char|uchar)\)-?\d+"
_BYTES = re.compile(rf"make_(int|uint)([24])\(({_BYTE}(?:, {_BYTE}){{7,15}})\)")


def mended(source: str) -> str:
    """CUDA source with the vectors that TVM writes wrong put right."""
    return _eight_lanes(_whole_words(source))


_EIGHT = """template <class V, class T>
static __forceinline__ __device__ V tvmx_eight(T a, T b, T c, T d, T e, T f, T g, T h) {
  V v;
  T* lanes = (T*)&v;
  lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d, lanes[4] = e, lanes[5] = f, lanes[6] = g, lanes[7] = h;
  return v;
}
"""
_LONG = re.compile(r"\bmake_(u?longlong4)\(")


def _eight_lanes(source: str) -> str:
    """Eight 32-bit lanes lie in a (u)longlong4, whose constructor TVM gives one argument per lane; it takes four."""
    out: list[str] = []
    at = 0
    for match in _LONG.finditer(source):
        if len(_arguments(source, match.end())) == 8:
            out += [source[at : match.start()], f"tvmx_eight<{match[1]}>("]
            at = match.end()
    if not out:
        return source
    body = "".join([*out, source[at:]])
    first = body.index('extern "C" __global__')
    return body[:first] + _EIGHT + body[first:]


def _arguments(text: str, start: int) -> list[str]:
    """The arguments of a call whose parenthesis opens before `start`."""
    depth, last = 0, start
    found: list[str] = []
    for at in range(start, len(text)):
        c = text[at]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                return [*found, text[last:at]]
            depth -= 1
        elif c == "," and depth == 0:
            found.append(text[last:at])
            last = at + 1
    raise CompileError("unbalanced parentheses in CUDA source")


def _whole_words(source: str) -> str:
    """TVM writes a vector of 8 or 16 constant bytes with one argument per byte; the constructor takes words."""

    def words(match: re.Match[str]) -> str:
        codes = [int(v.rpartition(")")[2]) & 0xFF for v in match[3].split(", ")]
        found = [sum(c << 8 * i for i, c in enumerate(codes[at : at + 4])) for at in range(0, len(codes), 4)]
        return f"make_{match[1]}{match[2]}({', '.join(f'(int)0x{w:08x}u' for w in found)})"

    return _BYTES.sub(words, source)


def _launches(host: Any, argument: Callable[..., Any], launch: Callable[..., Any]) -> list[Any]:
    """The kernel calls of the host function, their pointers traced back to its parameters or workspaces."""
    from tvm import tirx
    from tvm.ir import Call

    from tvmx.schedule.tir import substitute, walk

    owner = _Owners(host)
    values: list[tuple[Any, Any]] = []
    walk(host.body, tirx.Bind, lambda b: values.append((b.var, b.value)))
    found: list[Any] = []

    def plain(expr: Any) -> Any:
        for _ in values:
            expr = substitute(expr, values)
        return expr

    def one(expr: Any) -> Any:
        if _is_number(expr):
            return argument(0, str(expr.ty.dtype), (), plain(expr))
        index, buffer = owner.find(expr)
        return argument(index, str(buffer.dtype), [plain(e) for e in buffer.shape], None)

    def visit(call: Any) -> None:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel":
            return
        kernel, *rest = call.args
        tags = [str(t) for t in call.attrs["launch_params"]]
        arguments, sizes = rest[: len(rest) - len(tags)], rest[len(rest) - len(tags) :]
        extents = {tag: plain(size) for tag, size in zip(tags, sizes)}
        grid, block = ([extents.get(f"{kind}.{axis}", 1) for axis in AXES] for kind in ("blockIdx", "threadIdx"))
        shared = extents.get("tirx.use_dyn_shared_memory", 0)
        found.append(launch(str(kernel.value), [one(a) for a in arguments], grid, block, shared))

    walk(host.body, Call, visit)
    return found


def _is_number(expr: Any) -> bool:
    """Is a kernel's argument a scalar, not a pointer?"""
    dtype = str(getattr(expr.ty, "dtype", "handle"))
    return dtype.startswith(("int", "uint"))


def _int(value: Any, kernel: Any) -> int:
    if isinstance(value, int):
        return value
    if hasattr(value, "value"):
        return int(value.value)
    raise CompileError(f"kernel {kernel}: launch size {value} is not known at compile time")


class _Owners:
    """Which parameter or workspace a pointer expression of the host function points into."""

    def __init__(self, host: Any) -> None:
        from tvm import tirx

        from tvmx.schedule.tir import walk

        self._params = [p for p in host.params if hasattr(p.ty, "shape")]
        self._views: list[tuple[Any, Any]] = []  # (declared buffer, its data expression)
        self._spaces: list[Any] = []
        walk(host.body, tirx.DeclBuffer, lambda d: self._views.append((d.buffer, d.data)))
        walk(host.body, tirx.AllocBuffer, lambda a: self._spaces.append(a.buffer))

    def find(self, pointer: Any) -> tuple[int, Any]:
        """(index as in `Argument`, the buffer)."""
        buffer = _pointee(pointer)
        for _ in range(8):
            for index, param in enumerate(self._params):
                if buffer.same_as(param):
                    return index, param
            for index, space in enumerate(self._spaces):
                if buffer.same_as(space):
                    return -1 - index, space
            view = next((data for b, data in self._views if b.same_as(buffer)), None)
            if view is None:
                break
            buffer = _pointee(view)
        raise CompileError(f"cannot tell which tensor the launch argument {pointer} belongs to")


def _pointee(expr: Any) -> Any:
    """The buffer of `buffer.data`."""
    args = getattr(expr, "args", None)
    return args[0] if args is not None and len(args) == 1 else expr


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:300]
