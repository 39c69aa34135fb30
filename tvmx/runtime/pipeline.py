"""Overlap input preparation, execution and output hand-over: two threads beside the caller, bounded queues between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tvmx.errors import InputError
from tvmx.runtime.slots import Array

if TYPE_CHECKING:
    from tvmx.runtime.executor import GraphExecutor

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue of at most `depth` items between two threads. Either side may end it."""

    def __init__(self, depth: int) -> None:
        self._items: deque[T] = deque()
        self._depth = depth
        self._changed = threading.Condition()
        self._finished = False
        self._cancelled = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room and add `item`; False when the receiver has gone."""
        with self._changed:
            while len(self._items) >= self._depth and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> None:
        """No more items; the receiver gets `error`, if any, after those that are queued."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def cancel(self) -> None:
        """The receiver takes no more; a waiting sender goes on."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                while not self._items and not self._finished and not self._cancelled:
                    self._changed.wait()
                if self._cancelled:
                    return
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item


class Pipeline:
    """Runs a stream of items through `prepare` → the model → `finish`, each in a thread of its own.

    `prepare(item)` gives the model's inputs; it runs in one thread, the model in a second one, and `finish(item,
    outputs)` in the caller's, while it iterates. At most `depth` items wait between two stages (2: double buffering),
    so a slow stage holds back the ones before it. Results come in the order of the items. An error in any stage ends
    the stream and is raised where the caller iterates, after the results that came before it.

    >>> with GraphExecutor("m.so") as ex, Pipeline(ex, prepare=load_picture) as pipeline:
    ...     for name, outputs in pipeline(names): ...
    """

    def __init__(
        self,
        executor: GraphExecutor,
        prepare: Callable[[Any], Mapping[str, Any]] = lambda item: item,
        finish: Callable[[Any, dict[str, Array]], Any] = lambda item, outputs: (item, outputs),
        depth: int = 2,
    ) -> None:
        if depth < 1:
            raise InputError(f"depth={depth}: a pipeline needs room for at least one item between its stages")
        self._executor, self._prepare, self._finish, self._depth = executor, prepare, finish, depth
        self._streams: list[_Stream] = []

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Start the stages on `items`; iterate over the results. Leaving the loop early stops them."""
        stream = _Stream(self._executor, self._prepare, items, self._depth)
        self._streams.append(stream)
        results = self._results(stream)
        next(results)  # into its `try`: from here on, dropping it stops the stages even if it was never iterated
        return results

    def _results(self, stream: _Stream) -> Iterator[Any]:
        try:
            yield None
            for item, outputs in stream.outputs:
                yield self._finish(item, outputs)
        finally:
            stream.stop()
            self._streams.remove(stream)

    def close(self) -> None:
        """Stop every stream and wait for its threads. The executor stays open."""
        for stream in list(self._streams):
            stream.stop()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Stream:
    """The two threads and two channels of one pass over items."""

    def __init__(
        self,
        executor: GraphExecutor,
        prepare: Callable[[Any], Mapping[str, Any]],
        items: Iterable[Any],
        depth: int,
    ) -> None:
        self.inputs: Channel[tuple[Any, Mapping[str, Any]]] = Channel(depth)
        self.outputs: Channel[tuple[Any, dict[str, Array]]] = Channel(depth)
        self._threads = [
            threading.Thread(target=self._feed, args=(prepare, items), name="tvmx-prepare", daemon=True),
            threading.Thread(target=self._run, args=(executor,), name="tvmx-run", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Cancel both channels and wait for the threads; each ends after the item it is working on."""
        self.inputs.cancel()
        self.outputs.cancel()
        for thread in self._threads:
            thread.join()

    def _feed(self, prepare: Callable[[Any], Mapping[str, Any]], items: Iterable[Any]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self.inputs.put((item, prepare(item))):
                    break
        except BaseException as raised:  # handed to the caller
            error = raised
        self.inputs.finish(error)

    def _run(self, executor: GraphExecutor) -> None:
        error: BaseException | None = None
        try:
            for item, inputs in self.inputs:
                if not self.outputs.put((item, executor(inputs))):
                    break
        except BaseException as raised:  # handed to the caller
            error = raised
        self.inputs.cancel()  # a preparer that waits for room ends
        self.outputs.finish(error)
