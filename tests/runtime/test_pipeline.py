"""Pipeline: order, back-pressure, errors, shutdown."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tvmx.errors import InputError
from tvmx.runtime import GraphExecutor, Pipeline


def _x(seed):
    return np.random.default_rng(seed).standard_normal((32, 64)).astype("float32")


def _threads():
    return [t for t in threading.enumerate() if t.name.startswith("tvmx-")]


def test_results_in_order_and_equal_to_plain_calls(library):
    with GraphExecutor(library) as ex:
        want = [ex({"x": _x(i)})["y"] for i in range(20)]
        with Pipeline(ex, prepare=lambda i: {"x": _x(i)}) as pipeline:
            got = list(pipeline(range(20)))
        assert [i for i, _ in got] == list(range(20))
        for (_, outputs), expected in zip(got, want):
            np.testing.assert_array_equal(outputs["y"], expected)
        assert not _threads()


def test_finish_runs_in_the_callers_thread(library):
    with GraphExecutor(library) as ex:
        pipeline = Pipeline(
            ex,
            prepare=lambda i: {"x": _x(i)},
            finish=lambda item, outputs: (threading.current_thread(), float(outputs["y"].sum())),
        )
        for thread, total in pipeline(range(3)):
            assert thread is threading.current_thread()
            assert total == pytest.approx(32, rel=1e-4)


def test_a_slow_consumer_holds_the_preparer_back(library):
    prepared = []

    def prepare(i):
        prepared.append(i)
        return {"x": _x(0)}

    with GraphExecutor(library) as ex, Pipeline(ex, prepare, depth=1) as pipeline:
        results = pipeline(range(100))
        next(results)
        time.sleep(0.2)
        # one result taken, one waiting, one being handed over, one waiting as input, one being handed over
        assert len(prepared) <= 5
        results.close()
    assert not _threads()


@pytest.mark.parametrize("stage", ["items", "prepare", "run", "finish"])
def test_an_error_in_any_stage_reaches_the_caller_after_earlier_results(library, stage):
    def items():
        for i in range(50):
            if stage == "items" and i == 3:
                raise KeyError("items")
            yield i

    def prepare(i):
        if stage == "prepare" and i == 3:
            raise KeyError("prepare")
        return {"x": _x(i) if stage != "run" or i != 3 else np.zeros(3)}

    def finish(item, outputs):
        if stage == "finish" and item == 3:
            raise KeyError("finish")
        return item

    seen = []
    with GraphExecutor(library) as ex, Pipeline(ex, prepare, finish) as pipeline:
        with pytest.raises(InputError if stage == "run" else KeyError):
            seen.extend(pipeline(items()))  # extends item by item
        assert seen == [0, 1, 2]
        assert not _threads()


def test_leaving_early_stops_the_threads(library):
    with GraphExecutor(library) as ex:
        with Pipeline(ex, lambda i: {"x": _x(i)}) as pipeline:
            for item, _ in pipeline(iter(int, 1)):  # an endless stream
                assert item == 0
                break
        assert not _threads()


def test_a_stream_that_is_never_iterated_stops_when_dropped(library):
    with GraphExecutor(library) as ex:
        pipeline = Pipeline(ex, lambda i: {"x": _x(i)})
        pipeline(iter(int, 1)).close()
        assert not _threads()
        stream = pipeline(iter(int, 1))
        del stream
        assert not _threads()


def test_two_streams_of_one_pipeline(library):
    with GraphExecutor(library) as ex, Pipeline(ex, lambda i: {"x": _x(i)}, lambda i, o: i) as pipeline:
        assert list(zip(pipeline(range(5)), pipeline(range(5)))) == [(i, i) for i in range(5)]


def test_preparation_overlaps_finishing(library):
    """Item 1 is finished only after item 2's preparation has begun: a plain loop would never get there."""
    begun = threading.Event()

    def prepare(i):
        if i == 2:
            begun.set()
        return {"x": _x(0)}

    def finish(item, outputs):
        return begun.wait(timeout=30) if item == 1 else True

    with GraphExecutor(library) as ex, Pipeline(ex, prepare, finish) as pipeline:
        assert all(pipeline(range(4)))


def test_depth_is_checked(library):
    with GraphExecutor(library) as ex, pytest.raises(InputError, match="depth=0"):
        Pipeline(ex, depth=0)
