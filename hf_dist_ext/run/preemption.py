"""A run that is asked to leave by SIGTERM, SIGUSR1 or Ctrl-C: one whole step, one checkpoint, and an exit code. It is
75 ("requeue me"), but 130 after Ctrl-C: nobody shall start that run again. A second Ctrl-C ends at once.

(1) a signal sets a flag on the process that got it; one process is enough, whichever it is
(2) the processes tell each other once per step (training/health.py), and all stop behind the same one
(3) a process that has nothing to finish (it loads, or it saves what is trained) leaves at once with the same code
(4) a launcher of ours hands the signal on and waits as long as it takes; torchrun's kills after 30 seconds

The module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType

REQUEUE = 75  # EX_TEMPFAIL: try again later
INTERRUPTED = 128 + signal.SIGINT
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MARK = "preempted.json"  # in output_dir, for those who started accelerate themselves: it hides exit codes


def exit_code(name: str | None) -> int:
    """Of a process that leaves because of the signal `name`; None is another process's signal."""
    return INTERRUPTED if name == "SIGINT" else REQUEUE


def is_free(number: int) -> bool:
    """Whether nobody else says what a signal does: a handler of the user's, or a shell whose jobs ignore it."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Listens while it is entered, in the main thread (elsewhere Python takes no signals and it does nothing).

    `received`: the signal's name, None before. `finishes_steps` is True while a training loop looks at it; otherwise
    (3) holds. A handler that the user has set before stays: it is theirs.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.finishes_steps = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                found = signal.getsignal(number)
                if is_free(number) or isinstance(getattr(found, "__self__", None), StopSignals):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leaves = isinstance(error, SystemExit) and error.code in (REQUEUE, INTERRUPTED)
        for number, handler in self._previous.items():
            # A signal that comes while the process ends must not turn its exit code into that of a death.
            signal.signal(number, signal.SIG_IGN if leaves else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the second one ends the process
        if not self.finishes_steps:
            self.received = name
            sys.exit(exit_code(name))  # (3)
        if self.received is None:
            self.received = name


def forward_to_children(number: int, frame: FrameType | None) -> None:
    """(4), as a signal handler."""
    import psutil

    children = psutil.Process().children()
    for child in children:
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended; the launcher will see that
            child.send_signal(number)
    if not children:
        sys.exit(exit_code(signal.Signals(number).name))


def write_mark(output_dir: str, step: int | None, name: str) -> None:
    """`step`: None while the run loads or saves."""
    text = json.dumps({"exit_code": REQUEUE, "step": step, "signal": name})
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    Path(output_dir, MARK).write_text(text + "\n", encoding="utf-8")


def remove_mark(output_dir: str) -> None:
    Path(output_dir, MARK).unlink(missing_ok=True)
