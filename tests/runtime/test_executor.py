"""GraphExecutor: inputs, outputs, threads, affinity, life cycle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.executor.programs import build, lowered
from tvmx.errors import ArtifactError, InputError
from tvmx.runtime import GraphExecutor
from tvmx.runtime.arena import aligned_array


def _x(seed=0, shape=(32, 64)):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_infos_and_numbers(library, reference):
    with GraphExecutor(library, threads=2) as ex:
        assert [(i.name, i.shape, i.dtype) for i in ex.inputs] == [("x", (32, 64), "float32")]
        assert [(o.name, o.shape, o.dtype) for o in ex.outputs] == [("y", (32, 64), "float32")]
        assert ex.arena_bytes >= ex.arena_lower_bound > 0
        np.testing.assert_allclose(ex({"x": _x()})["y"], reference(_x()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("offset", [0, 4, 16, 32, 60])
def test_any_alignment_and_strides(library, reference, offset):
    raw = aligned_array((32 * 64 * 4 + 64,), np.uint8)
    x = raw[offset : offset + 32 * 64 * 4].view("float32").reshape(32, 64)
    x[:] = _x()
    with GraphExecutor(library) as ex:
        np.testing.assert_allclose(ex({"x": x})["y"], reference(x), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ex({"x": np.asfortranarray(x)})["y"], reference(x), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ex({"x": x[::-1]})["y"], reference(x[::-1]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"x": np.zeros((32, 64), "float64")}, r"expected float32\[32, 64\], got float64.*astype"),
        ({"x": np.zeros((32, 63), "float32")}, r"got float32\[32, 63\] \(wrong shape\)"),
        ({"x": np.zeros((32, 64), ">f4")}, "wrong dtype"),
        ({"z": np.zeros((32, 64), "float32")}, r"missing 'x' and unknown 'z'"),
        ({}, "missing 'x'"),
        ({"x": _x(), "z": _x()}, "unknown 'z'"),
    ],
)
def test_wrong_inputs_say_what_was_expected(library, inputs, match):
    with GraphExecutor(library) as ex, pytest.raises(InputError, match=match):
        ex(inputs)


def test_outputs_are_owned_or_views(library):
    with GraphExecutor(library) as ex:
        first = ex({"x": _x(0)})["y"]
        kept = first.copy()
        ex({"x": _x(1)})
        np.testing.assert_array_equal(first, kept)
        ex.set_input("x", _x(0))
        ex.run()
        view, copy = ex.get_output(0), ex.get_output("y", copy=True)
        np.testing.assert_array_equal(view, kept)
        ex.set_input("x", _x(1))
        ex.run()
        assert not np.array_equal(view, kept)
        np.testing.assert_array_equal(copy, kept)
        with pytest.raises(InputError, match="no output 'q'"):
            ex.get_output("q")
        with pytest.raises(InputError, match="the model has 1"):
            ex.get_output(1)


def test_set_input_copies_unless_told_not_to(library):
    x = aligned_array((32, 64), np.float32)
    x[:] = _x(0)
    with GraphExecutor(library) as ex:
        want = ex({"x": x})["y"]
        ex.set_input("x", x)
        x[:] = 0
        ex.run()
        np.testing.assert_array_equal(ex.get_output(0), want)


def test_run_before_inputs_and_output_before_run(library):
    with GraphExecutor(library) as ex:
        with pytest.raises(InputError, match="call run"):
            ex.get_output(0)
        with pytest.raises(InputError, match="not set"):
            ex.run()
        with pytest.raises(InputError, match="no input"):
            ex.set_input("q", _x())


def test_closed_executor_refuses(library):
    ex = GraphExecutor(library)
    ex.close()
    ex.close()
    with pytest.raises(InputError, match="closed"):
        ex({"x": _x()})


def test_affinity_of_the_caller_never_changes(library):
    before = os.sched_getaffinity(0)
    with GraphExecutor(library, threads=2, affinity=[0, 1]) as ex:
        ex({"x": _x()})
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_workers_keep_off_the_processor_of_the_caller(library):
    """Woken on it, a worker would wait there behind the caller while another processor is idle."""
    before, threads = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
    with GraphExecutor(library, threads=2) as ex:
        (worker,) = (int(t) for t in set(os.listdir("/proc/self/task")) - threads)
        try:
            for cpu in sorted(before)[:2]:
                os.sched_setaffinity(0, {cpu})
                ex({"x": _x()})
                assert os.sched_getaffinity(worker) == before - {cpu}
        finally:
            os.sched_setaffinity(0, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_workers_of_a_pinned_caller_stay_on_its_processor(library):
    before, threads = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
    cpu = min(before)
    os.sched_setaffinity(0, {cpu})
    try:
        with GraphExecutor(library, threads=2) as ex:
            (worker,) = (int(t) for t in set(os.listdir("/proc/self/task")) - threads)
            ex({"x": _x()})
            assert os.sched_getaffinity(worker) == {cpu}
    finally:
        os.sched_setaffinity(0, before)


def test_threads_are_used_and_stopped(library):
    def count():
        return len(os.listdir("/proc/self/task"))

    before = count()
    with GraphExecutor(library, threads=3) as ex:
        ex({"x": _x()})
        assert count() == before + 2
    assert count() == before


def test_executors_in_threads_agree_bit_for_bit(library):
    with GraphExecutor(library, threads=1) as ex:
        want = [ex({"x": _x(i)})["y"] for i in range(4)]
    wrong = []

    def work(index):
        with GraphExecutor(library, threads=2) as ex:
            for _ in range(200):
                if not np.array_equal(ex({"x": _x(index)})["y"], want[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_one_executor_shared_by_threads_serialises(library):
    with GraphExecutor(library, threads=2) as ex:
        want = [ex({"x": _x(i)})["y"] for i in range(3)]
        wrong = []

        def work(index):
            for _ in range(100):
                if not np.array_equal(ex({"x": _x(index)})["y"], want[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong


def test_a_replaced_file_is_loaded_anew(tmp_path):
    from tvm import relax

    def version(factor):
        body = lambda b, x: b.emit(relax.op.multiply(x, relax.const(np.float32(factor))))  # noqa: E731
        return build(lowered([("x", (4,), "float32")], body), ["y"], tmp_path / "m.so").path

    x = np.ones(4, "float32")
    with GraphExecutor(version(2)) as old:
        with GraphExecutor(version(3)) as new:
            assert new({"x": x})["y"][0] == 3
        assert old({"x": x})["y"][0] == 2


def test_scalars_empty_tensors_and_dtypes(tmp_path):
    from tvm import relax

    def body(b, s, e, f, k, h):
        return [
            b.emit(relax.op.add(s, relax.const(np.float32(1)))),
            b.emit(relax.op.add(e, e)),
            b.emit(relax.op.logical_not(f)),
            b.emit(relax.op.add(k, k)),
            b.emit(relax.op.add(h, h)),
        ]

    inputs = [
        ("s", (), "float32"), ("e", (0, 3), "float32"), ("f", (5,), "bool"), ("k", (3,), "int64"),
        ("h", (7,), "float16"),
    ]  # fmt: skip
    path = build(lowered(inputs, body), ["a", "b", "c", "d", "h2"], tmp_path / "m.so").path
    with GraphExecutor(path) as ex:
        flags = np.array([True, False, True, True, False])
        out = ex(
            {
                "s": np.float32(2), "e": np.zeros((0, 3), "float32"), "f": flags,
                "k": np.array([1, 2, 2**40]), "h": np.arange(7, dtype="float16"),
            }
        )  # fmt: skip
        assert out["a"].shape == ()
        assert out["a"] == 3
        assert out["b"].shape == (0, 3)
        np.testing.assert_array_equal(out["c"], ~flags)
        np.testing.assert_array_equal(out["d"], [2, 4, 2**41])
        np.testing.assert_array_equal(out["h2"], 2 * np.arange(7, dtype="float16"))


def test_unknown_entry_and_threads(library):
    with pytest.raises(ArtifactError, match="it has main"):
        GraphExecutor(library, entry="b8")
    with pytest.raises(InputError, match="threads=0"):
        GraphExecutor(library, threads=0)


def test_runtime_imports_neither_tvm_nor_onnx(library):
    code = (
        "import sys, numpy as np\n"
        "from tvmx.runtime import GraphExecutor\n"
        f"ex = GraphExecutor({str(library)!r}, threads=2)\n"
        "ex({'x': np.zeros((32, 64), 'float32')})\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('tvm', 'tvm_ffi', 'onnx', 'onnxruntime')]\n"
        "bad += [m for m in sys.modules if m.startswith('tvmx.') and m.split('.')[1] not in "
        "('runtime', 'memory', 'errors')]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_benchmark_counts_runs(library):
    with GraphExecutor(library) as ex:
        ex.set_input("x", _x())
        result = ex.benchmark(repeat=7)
        assert len(result.samples) == 7
        assert 0 < result.min_s <= result.median_s


def test_wrong_kinds_of_argument_say_what_is_expected(library):
    for wrong in ({"threads": "2"}, {"threads": 1.5}, {"threads": 2, "affinity": [0, "1"]}, {"affinity": [1 << 20]}):
        with pytest.raises(InputError, match=r"threads=|affinity="):
            GraphExecutor(library, **wrong)
    with GraphExecutor(library) as ex:
        with pytest.raises(InputError, match="dict of input name"):
            ex(_x())
        ex({"x": _x()})
        with pytest.raises(InputError, match="no output None"):
            ex.get_output(None)
