"""The C side of a loaded artifact, through ctypes. The layout is that of tvmx_abi.h."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from tvmx.errors import ArtifactError
from tvmx.runtime.seal import SEAL_SIZE

AfterNode = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


class Call(ctypes.Structure):
    """`tvmx_call`."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("ticks", ctypes.c_void_p),
        ("after", AfterNode),
        ("after_context", ctypes.c_void_p),
    )


class LoadedLibrary:
    """An artifact in memory: the very file that was checked."""

    def __init__(self, path: str, seal: bytes) -> None:
        self.path = path
        self._link_folder: str | None = None
        self.dll = _open(path)
        if self._seal() != seal:
            # The system's loader knows libraries by name and gave us what this path held before.
            self._unload()
            self._link_folder = tempfile.mkdtemp(prefix="tvmx-")
            self.path = os.path.join(self._link_folder, os.path.basename(path))
            os.symlink(path, self.path)
            self.dll = _open(self.path)
            if self._seal() != seal:
                self.close()
                raise ArtifactError(f"{path} was replaced while it was being loaded; load it again")

    def close(self) -> None:
        """Unload. Nothing of the library may be used afterwards."""
        self._unload()
        if self._link_folder is not None:
            shutil.rmtree(self._link_folder, ignore_errors=True)

    def _unload(self) -> None:
        _ctypes.dlclose(self.dll._handle)

    def _seal(self) -> bytes:
        try:
            return bytes((ctypes.c_char * SEAL_SIZE).in_dll(self.dll, "tvmx_seal"))
        except ValueError:
            return b""

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        try:
            function = getattr(self.dll, name)
        except AttributeError:
            raise ArtifactError(f"{self.dll._name} lacks {name}; compile the model again") from None
        function.restype, function.argtypes = result, list(arguments)
        return function


class Library(LoadedLibrary):
    """A loaded artifact's functions. Pools are made and freed by their executor."""

    def __init__(self, path: str, seal: bytes) -> None:
        super().__init__(path, seal)
        self._peaks: dict[int, tuple[dict[str, float], float]] = {}
        self.pool_new = self._function("tvmx_pool_new", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self.pool_free = self._function("tvmx_pool_free", None, ctypes.c_void_p)
        self.pool_scratch = self._function("tvmx_pool_scratch", ctypes.c_int64, ctypes.c_void_p)
        self.pool_enter = self._function("tvmx_pool_enter", ctypes.c_void_p, ctypes.c_void_p)
        self.last_error = self._function("tvmx_last_error", ctypes.c_char_p)
        self.ticks = self._function("tvmx_ticks", ctypes.c_int64)

    def run_function(self, entry: str) -> Any:
        """`tvmx_run_<entry>`: takes the address of a Call, returns 0 or 1 + the node that failed."""
        return self._function(f"tvmx_run_{entry}", ctypes.c_int, ctypes.c_void_p)

    def params(self) -> int:
        """Address of the parameters."""
        return int(self._function("tvmx_params", ctypes.c_void_p)())

    def peak(self, pool: int, threads: int) -> tuple[dict[str, float], float]:
        """(operations/s by dtype of the products, bytes/s) reached with `threads` threads, measured on first use."""
        if threads not in self._peaks:
            measure = self._function("tvmx_peak_rates", None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            bandwidth = self._function("tvmx_peak_bandwidth", ctypes.c_double, ctypes.c_void_p, ctypes.c_int)
            rates = (ctypes.c_double * 3)()
            measure(pool, threads, rates)
            known = {dtype: rate for dtype, rate in zip(("float32", "int8", "bfloat16"), rates) if rate}
            self._peaks[threads] = known, float(bandwidth(pool, threads))
        return self._peaks[threads]

    def new_pool(self, threads: int, cpus: Sequence[int] | None) -> int:
        """Make a pool of `threads` threads, the caller among them."""
        array = None
        if cpus is not None:
            padded = [*cpus[:threads], *[-1] * (threads - len(cpus))]
            array = (ctypes.c_int * threads)(*padded)
        pool = self.pool_new(threads, array)
        if not pool:
            reason = self.last_error().decode(errors="replace")
            raise ArtifactError(reason or f"cannot start {threads} threads; use fewer")
        return int(pool)


def _open(path: str) -> ctypes.CDLL:
    try:
        # RTLD_LOCAL: two models may hold equal symbols.
        return ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise ArtifactError(f"cannot load {path}: {error}") from None
