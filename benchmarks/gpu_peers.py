"""cuBLAS and cuDNN for `benchmarks.gpu`: through PyTorch or CuPy where installed, else cuBLAS by ctypes."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from typing import Any

import numpy as np

from benchmarks.gpu_cases import Case

_TORCH = {"float16": "float16", "bfloat16": "bfloat16", "int8": "int8"}
_R_16F, _R_8I, _R_32F, _R_32I, _R_16BF = 2, 3, 0, 10, 14  # cudaDataType
_COMPUTE_32F, _COMPUTE_32I = 68, 72  # cublasComputeType
_GEMM_DEFAULT_TENSOR_OP = 99


class Rival:
    """One library call over rotating buffers on the device's stream. `close` frees them."""

    def __init__(self, issue: Any, close: Any = None) -> None:
        self._issue, self._close, self._turn = issue, close, 0

    def __call__(self) -> None:
        self._issue(self._turn)
        self._turn += 1

    def close(self) -> None:
        if self._close is not None:
            self._close()


class Peers:
    """What this machine has to compare with. `name` is empty where it has nothing."""

    def __init__(self, device: Any, enabled: bool = True) -> None:
        self.device = device
        self.name, self._versions, self._make = "", {}, None
        if not enabled:
            return
        for name, attempt in (("torch", self._torch), ("cupy", self._cupy), ("cublas", self._cublas)):
            try:
                make = attempt()
            except Exception as error:  # a broken installation is the same as none, with its reason kept
                self._versions[name] = f"not usable: {error}"
                continue
            if make is not None:
                self.name, self._make = name, make
                return

    def describe(self) -> dict[str, Any]:
        return {"used": self.name or None, **self._versions}

    def prepare(self, case: Case, x: np.ndarray, weight: np.ndarray, copies: int) -> tuple[Rival | None, str]:
        """The library's call for a case, or why there is none."""
        if self._make is None:
            return None, "neither torch, cupy nor libcublas is installed"
        try:
            rival = self._make(case, x, weight, copies)
        except Exception as error:  # the library refuses this case
            return None, f"{self.name}: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}"
        return rival, "" if rival is not None else f"{self.name} has no call for this case"

    def _torch(self) -> Any:
        if importlib.util.find_spec("torch") is None:
            return None
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        torch.backends.cudnn.benchmark = True
        self._versions |= {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        stream = torch.cuda.ExternalStream(self.device.stream)

        def make(case: Case, x: np.ndarray, weight: np.ndarray, copies: int) -> Rival | None:
            if case.dtype == "int8" and (case.kind == "conv" or len(case.x) != 2):
                return None
            with torch.cuda.stream(stream):
                sets = [
                    (_on_device(torch, x, case.dtype), _on_device(torch, weight, case.dtype)) for _ in range(copies)
                ]
                run = _torch_call(torch, case, sets)
                for i in range(3):
                    run(i)  # cuDNN tries its algorithms outside of any capture
                torch.cuda.synchronize()

            def issue(turn: int) -> None:
                with torch.cuda.stream(stream):
                    run(turn)

            return Rival(issue, sets.clear)

        return make

    def _cupy(self) -> Any:
        if importlib.util.find_spec("cupy") is None:
            return None
        cupy = importlib.import_module("cupy")
        self._versions["cupy"] = cupy.__version__
        stream = cupy.cuda.ExternalStream(self.device.stream)

        def make(case: Case, x: np.ndarray, weight: np.ndarray, copies: int) -> Rival | None:
            if case.kind == "conv" or case.dtype != "float16":
                return None
            with stream:
                sets = [(cupy.asarray(x), cupy.asarray(weight)) for _ in range(copies)]
                out = cupy.matmul(*sets[0])

            def issue(turn: int) -> None:
                with stream:
                    cupy.matmul(*sets[turn % copies], out=out)

            return Rival(issue, sets.clear)

        return make

    def _cublas(self) -> Any:
        library = None
        for name in ("libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"):
            try:
                library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        if library is None:
            return None
        handle = ctypes.c_void_p()
        _must(library.cublasCreate_v2(ctypes.byref(handle)))
        _must(library.cublasSetStream_v2(handle, ctypes.c_void_p(self.device.stream)))
        version = ctypes.c_int()
        library.cublasGetVersion_v2(handle, ctypes.byref(version))
        self._versions["cublas"] = version.value

        def make(case: Case, x: np.ndarray, weight: np.ndarray, copies: int) -> Rival | None:
            return _cublas_call(self.device, library, handle, case, x, weight, copies)

        return make


def _on_device(torch: Any, array: np.ndarray, dtype: str) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.int16) if dtype == "bfloat16" else array)
    return (tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor).cuda()


def _torch_call(torch: Any, case: Case, sets: list[Any]) -> Any:
    if case.kind == "gemm":
        pairs = [(a, b.transpose(-1, -2) if case.transposed else b) for a, b in sets]
        if case.dtype == "int8":
            pairs = [(a, b.t().contiguous().t()) for a, b in pairs]  # _int_mm wants b by columns
            return lambda turn: torch._int_mm(*pairs[turn % len(pairs)])
        out = torch.matmul(*pairs[0])
        return lambda turn: torch.matmul(*pairs[turn % len(pairs)], out=out)
    last = torch.channels_last
    placed = [
        (x.permute(0, 3, 1, 2).contiguous(memory_format=last), w.permute(3, 2, 0, 1).contiguous(memory_format=last))
        for x, w in sets
    ]
    sets[:] = placed
    options = {"stride": case.stride, "padding": case.pad, "dilation": case.dilation, "groups": case.groups}
    return lambda turn: torch.nn.functional.conv2d(*placed[turn % len(placed)], **options)


def _cublas_call(
    device: Any, library: Any, handle: Any, case: Case, x: np.ndarray, weight: np.ndarray, copies: int
) -> Rival | None:
    """cublasGemmEx over row-major operands: c' = b' · a', columns first."""
    if case.kind != "gemm" or len(case.x) != 2:
        return None
    (m, k), n = case.x, case.output[-1]
    whole = case.dtype == "int8"
    kind = {"float16": _R_16F, "bfloat16": _R_16BF, "int8": _R_8I}[case.dtype]
    compute, out_kind, out_bytes = (_COMPUTE_32I, _R_32I, 4) if whole else (_COMPUTE_32F, kind, 2)
    one = (ctypes.c_int32 if whole else ctypes.c_float)(1)
    zero = (ctypes.c_int32 if whole else ctypes.c_float)(0)
    sets = []
    for _ in range(copies):
        a, b, c = device.alloc(x.nbytes), device.alloc(weight.nbytes), device.alloc(m * n * out_bytes)
        device.upload(a, x.ctypes.data, x.nbytes)
        device.upload(b, weight.ctypes.data, weight.nbytes)
        sets.append((a, b, c))
    pointer = ctypes.c_void_p

    def issue(turn: int) -> None:
        a, b, c = sets[turn % copies]
        _must(
            library.cublasGemmEx(
                handle, int(case.transposed), 0, n, m, k, ctypes.byref(one), pointer(b), kind,
                k if case.transposed else n, pointer(a), kind, k, ctypes.byref(zero), pointer(c), out_kind, n, compute,
                _GEMM_DEFAULT_TENSOR_OP,
            )
        )  # fmt: skip

    issue(0)  # its workspace is made outside of any capture
    device.synchronize()

    def close() -> None:
        device.synchronize()
        for addresses in sets:
            for address in addresses:
                device.free(address)

    return Rival(issue, close)


def _must(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS status {status}")
