import pytest

from tvmx.errors import ConfigError
from tvmx.target import PRESETS, Target, detect_host, resolve


def test_host_facts_are_plausible():
    host = detect_host()
    assert host.threads >= 1
    assert 8 * 1024 <= host.l1_bytes <= host.l2_bytes <= host.l3_bytes
    assert host.vector_bytes in (16, 32, 64)


@pytest.mark.parametrize(
    ("name", "lanes", "registers"),
    [("x86_64-sse", 4, 16), ("x86_64-avx2", 8, 16), ("x86_64-avx512", 16, 32), ("aarch64-neon", 4, 32)],
)
def test_vector_facts_follow_features(name, lanes, registers):
    target = PRESETS[name]
    assert (target.lanes("float32"), target.vector_registers) == (lanes, registers)
    assert target.lanes("int8") == 4 * lanes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_tvm_target(name):
    assert str(PRESETS[name].tvm().kind) == ("cuda" if name.startswith("cuda") else "llvm")


def test_resolve_sets_threads_and_refuses_unknown_names():
    assert resolve("x86_64-avx2", 3).threads == 3
    with pytest.raises(ConfigError, match="x86_64-avx2"):
        resolve("skylake")
    with pytest.raises(ConfigError, match="at least 1"):
        Target("x", threads=0)


def test_gpu_facts_go_with_kind_cuda_only():
    gpu = PRESETS["cuda-sm80"].gpu
    assert gpu.has_mma
    assert not PRESETS["cuda-sm75"].gpu.has_mma
    assert PRESETS["cuda-sm80"].tvm_dict()["arch"] == "sm_80"
    with pytest.raises(ConfigError, match="gpu="):
        Target("x", kind="cuda")
    with pytest.raises(ConfigError, match="gpu="):
        Target("x", gpu=gpu)
