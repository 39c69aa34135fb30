"""The one place where TVM is patched or guarded. Import this before MetaSchedule.

1. `@T.prim_func` calls `inspect.stack()` twice per function, and that resolves every frame's module by
   scanning `sys.modules`: `import tvm.s_tir.tensor_intrin` takes 60-80 s of CPU. `fast_stack` walks frames
   instead (7 s, most of it parsing). `tests/test_compat.py` fails once upstream no longer needs it.
2. apache-tvm-ffi 0.1.15 makes `tvm.ir.save_json` segfault; `check_ffi` refuses it before it kills a session.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import linecache
import sys
from collections.abc import Iterator
from types import FrameType

from tvmx.errors import ConfigError

_CONTEXT_FRAMES = 16  # TVMScript looks at the innermost frames only


def _outer_frames(frame: FrameType | None, context: int = 1) -> list[inspect.FrameInfo]:
    frames: list[inspect.FrameInfo] = []
    while frame is not None:
        filename, line = frame.f_code.co_filename, frame.f_lineno
        code = None
        if context and len(frames) < _CONTEXT_FRAMES and not filename.startswith("<frozen"):
            text = linecache.getline(filename, line)
            code = [text] if text else None
        frames.append(inspect.FrameInfo(frame, filename, line, frame.f_code.co_name, code, 0 if code else None))
        frame = frame.f_back
    return frames


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    return _outer_frames(sys._getframe(1), context)


@contextlib.contextmanager
def fast_stack() -> Iterator[None]:
    """Replace `inspect.stack` and `inspect.getouterframes` by a frame walk inside the block."""
    saved = inspect.stack, inspect.getouterframes
    inspect.stack, inspect.getouterframes = _stack, _outer_frames
    try:
        yield
    finally:
        inspect.stack, inspect.getouterframes = saved


def check_ffi() -> None:
    """Raise ConfigError when the installed apache-tvm-ffi is one that crashes the process."""
    version = importlib.metadata.version("apache-tvm-ffi")
    if tuple(int(p) for p in version.split(".")[:3] if p.isdigit()) >= (0, 1, 15):
        raise ConfigError(
            f"apache-tvm-ffi {version} segfaults in tvm.ir.save_json; "
            "install it as `pip install 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'`"
        )


def load_tensor_intrinsics() -> None:
    """Import TVM's tensor intrinsics (and so everything MetaSchedule needs) in seconds, not a minute."""
    check_ffi()
    with fast_stack():
        import tvm.s_tir.tensor_intrin  # noqa: F401
