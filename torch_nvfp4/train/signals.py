"""Ctrl-C and SIGTERM while training: finish the step, save, leave; a second one ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_NOTICE = b"\nfinishing this step, then saving (once more ends at once, unsaved)\n"


class StopRequest:
    """Context manager; inside it `signum` is the first SIGINT or SIGTERM received, or None.

    Signals can only be caught in the main thread; in another one nothing is caught.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for caught in self._previous:
            signal.signal(caught, signal.SIG_DFL)
        os.write(2, _NOTICE)  # print() may not be re-entered from a handler
