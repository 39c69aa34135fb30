"""Ctrl-C and SIGTERM during a session: counted, so that the session ends where nothing is lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Counts signals instead of raising: TVM turns an exception in a callback into an error of its own.

    The second one raises. Outside the main thread signals belong to someone else, and nothing is counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            if old is not None:  # set by C code, and not to be had from here
                signal.signal(number, old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
