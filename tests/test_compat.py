"""The patched part of TVM: that the patch works, and that it is still needed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import subprocess
import sys
import time

import pytest

from tvmx import compat
from tvmx.errors import ConfigError


def deep(depth: int, call: object) -> object:
    return deep(depth - 1, call) if depth else call()  # type: ignore[operator]


def test_fast_stack_tells_what_inspect_tells() -> None:
    slow = deep(3, inspect.stack)
    with compat.fast_stack():
        fast = deep(3, inspect.stack)
    assert [(f.filename, f.function) for f in fast] == [(f.filename, f.function) for f in slow]  # type: ignore[attr-defined]
    assert fast[1].code_context == slow[1].code_context or fast[1].lineno != slow[1].lineno  # type: ignore[index]


def test_the_patch_ends_with_its_block() -> None:
    before = inspect.stack, inspect.getouterframes
    with compat.fast_stack():
        assert inspect.stack is not before[0]
    assert (inspect.stack, inspect.getouterframes) == before
    with contextlib.suppress(KeyError), compat.fast_stack():
        raise KeyError
    assert (inspect.stack, inspect.getouterframes) == before


def test_fast_stack_is_much_faster_with_many_modules_loaded() -> None:
    """What it saves: `inspect.stack` resolves each frame's module by scanning `sys.modules`."""
    import tvm  # noqa: F401  # some thousand modules

    def best(repeat: int = 3) -> float:
        times = []
        for _ in range(repeat):
            begin = time.process_time()
            deep(40, inspect.stack)
            times.append(time.process_time() - begin)
        return min(times)

    slow = best()
    with compat.fast_stack():
        fast = best()
    assert fast < slow / 2


def test_upstream_still_needs_it() -> None:
    """Fails when TVM's script entry no longer calls `inspect.stack`: then `fast_stack` can go."""
    from tvm.tirx.script.parser import entry

    assert "inspect.stack()" in inspect.getsource(entry)


@pytest.mark.slow
def test_tensor_intrinsics_load_in_seconds() -> None:
    code = """
import time
from tvmx.compat import load_tensor_intrinsics
begin = time.process_time()
load_tensor_intrinsics()
print(time.process_time() - begin)
"""
    run = [sys.executable, "-c", code]
    seconds = float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert seconds < 20  # CPU; 3-8 s here, 60-80 s without the patch


@pytest.mark.parametrize(("version", "refused"), [("0.1.14.post0", False), ("0.1.15", True), ("0.2.0", True)])
def test_the_ffi_that_segfaults_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, refused: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if refused:
        with pytest.raises(ConfigError, match="pip install"):
            compat.check_ffi()
    else:
        compat.check_ffi()


def test_the_installed_ffi_saves_json() -> None:
    """What 0.1.15 dies of; in a process of its own, since it would take this one along."""
    compat.check_ffi()
    code = "import tvm; tvm.ir.load_json(tvm.ir.save_json(tvm.IRModule({})))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
