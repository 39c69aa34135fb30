"""What a library embeds of a kernel: a cubin of the target's architecture, and PTX that a driver can compile."""

from __future__ import annotations

import pytest

from tvmx.cuda import images
from tvmx.cuda.images import compile_image
from tvmx.cuda.nvcc import nvcc
from tvmx.cuda.nvrtc import nvrtc
from tvmx.errors import CompileError

SOURCE = """
extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }
"""


@pytest.mark.parametrize("tool", ["nvcc", "nvrtc"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_both_kinds_of_code(tool: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "nvcc" and nvcc() is None:
        pytest.skip("needs nvcc")
    if tool == "nvrtc":
        if nvrtc() is None:
            pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt")
        monkeypatch.setattr(images, "nvcc", lambda: None)
        monkeypatch.setattr("tvmx.cuda.nvcc.nvcc", lambda: None)
    image = compile_image(SOURCE, arch)
    assert image.cubin.data.startswith(b"\x7fELF")
    assert [k.kernel for k in image.cubin.kernels] == ["twice"]
    assert f".target {arch}".encode() in image.ptx
    assert image.ptx.endswith(b"\0")
    assert image.ptx.count(b"\0") == 1


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_errors_are_the_compilers() -> None:
    with pytest.raises(CompileError, match=r"k: nvcc for sm_80 says: .*error"):
        compile_image('extern "C" __global__ void k() { nonsense; }', "sm_80", "k")


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_wgmma_is_for_one_architecture() -> None:
    code = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }'
    image = compile_image(code, "sm_90")
    assert image.cubin.arch == "sm_90a"
    assert b".target sm_90a" in image.ptx
