"""The first error is the one you see: what an entry point and a watchdog do when one of several processes fails.

(1) an entry point runs inside `exit_on_usage_error`, which prints an error that is meant to be read as one line. What
    all ranks run is inside `first_error_only`: the error of a process that failed by itself is recorded for the
    launcher and raised; one that only lost its peers waits in silence, as the launcher is about to end it
(2) every such error says where it happened: rank, step, phase
(3) processes whose launcher is gone end: what they meet through went with it, so a save would wait for ever
(4) processes that do not meet to make their group end with address, port and what to check
(5) a watchdog per process knows step and phase. When a step takes longer than allowed, the processes leave notes in
    the group's store; one tells who was where and who left no note, and all end

Up to the end of the first step `ddp_timeout` counts (models load, kernels compile), and so it does in evaluations and
saves; then `step_timeout` counts for a step with its data. Importing this file needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.errors import RunError, UsageError

PEER_WORDS = (  # of gloo, NCCL and the store, when another process is gone
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError", "Socket Timeout",
    "remote process exited", "NCCL communicator was aborted", "Connection was likely closed", "Read error",
)  # fmt: skip
PEER_SECONDS = 6  # a launcher ends the others 0.1 to 2 s after one failed
SAME_ERROR_SECONDS = 2  # for rank 0 to say what all have
SAME_LINE_SECONDS = 4  # and for the launcher to end the others after it
NOTE_SECONDS = 2  # for the others to leave their notes
FRAMES = 2  # of a note
CHECKS = (
    "Look first whether one of them ended with an error of its own. Check that every machine was started with the "
    "same address and port, that the port is open between them (firewall), and that all take the network that they "
    "reach each other by: name its interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (`ip -br addr` lists "
    "them). NCCL_DEBUG=INFO shows what NCCL tries."
)
ORPHAN_SECONDS = 30  # for a step and its checkpoint, where a signal ended the launcher and came here too


class Activity:
    """What this process does: written by the trainer, read by whoever reports."""

    def __init__(self) -> None:
        self.step, self.is_step = 0, False
        self.enter("starting")
        self.touch()

    def enter(self, name: str, step: int | None = None) -> None:
        """`step`: a new step begins; otherwise the same goes on."""
        self.name = name
        if step is not None:
            self.step, self.is_step = step, True
            self.touch()

    def leave_step(self, name: str) -> None:
        """An evaluation, a save, the end: `step_timeout` does not count."""
        self.name, self.is_step = name, False
        self.touch()

    def touch(self) -> None:
        self.since = time.monotonic()

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}, for {time.monotonic() - self.since:.0f} s"


activity = Activity()


@contextlib.contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """UsageError or RunError -> `error: ...` on stderr from one rank and its exit code; HF_DIST_DEBUG=1 shows the
    traceback. Ctrl-C ends with exit code 130 and without one."""
    try:
        yield
    except (UsageError, RunError) as error:
        if os.environ.get("HF_DIST_DEBUG") == "1":
            raise
        happened = time.time()
        if rank := launched.rank():
            # Mostly rank 0 has the same error and the launcher ends this process while it waits; if not, it speaks.
            time.sleep(SAME_LINE_SECONDS)
        is_said = _is_recorded(str(error))
        record(str(error), happened=happened)
        if not is_said:  # by a process that takes long to end
            print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def end_with_reader() -> Iterator[None]:
    """Who reads this process's stdout may stop early, as `head` does: it then ends quietly, with exit code 141, as a
    program that the signal of a closed pipe ends."""
    try:
        try:
            yield
        finally:  # also what stands before an exit: Python would flush it after us, and complain
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise  # of some other pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        sys.exit(128 + signal.SIGPIPE)


def _has_lost_its_reader() -> bool:
    """Whether stdout is a pipe that nobody reads any more. A failed write may have dropped what it had to write, so
    that another flush says nothing."""
    waiting = select.poll()
    waiting.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))


@contextlib.contextmanager
def first_error_only() -> Iterator[None]:
    """Around what every rank runs. A lost peer is no error of this rank as long as a launcher acts on the real one."""
    try:
        yield
    except Exception as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's; there is no step to finish any more
        if isinstance(error, (UsageError, RunError)):
            raise  # exit_on_usage_error says it
        place = f"[rank {launched.rank()}: {activity}]"
        if hasattr(error, "add_note"):
            error.add_note(place)
        elif not is_about_a_peer(error):  # Python 3.10 has no notes: a line above the traceback
            print(place, file=sys.stderr, flush=True)
        if launched.processes() > 1:
            if is_about_a_peer(error):
                time.sleep(PEER_SECONDS)
            else:
                happened = time.time()
                time.sleep(SAME_ERROR_SECONDS if launched.rank() else 0)
                record(f"{type(error).__name__}: {error} {place}", traceback.format_exc(), happened)
        raise


def is_about_a_peer(error: BaseException | None) -> bool:
    """Whether an error says only that another process is gone."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, RuntimeError) and any(word in str(error) for word in PEER_WORDS):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def record(text: str, stack: str = "", happened: float | None = None) -> None:
    """Leave the message where torchrun looks for the root cause, which is the earliest one.

    A process that waits for its launcher records after that: one that is ended while it waits would pass for the
    cause, with SIGTERM as its exit code. `happened`: seconds since 1970; None: now.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        timestamp = str(int(time.time() if happened is None else happened))
        message = {"message": text, "extraInfo": {"py_callstack": stack or text, "timestamp": timestamp}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def _is_recorded(text: str) -> bool:
    """Whether a process of this machine left the same message; torchrun gives each a file in a folder of its own."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    others = Path(path).parent.parent.glob(f"*/{Path(path).name}")
    return any(json.dumps(text) in file.read_text(encoding="utf-8") for file in others)


@functools.cache  # one thread is enough
def end_with_launcher(seconds: float = ORPHAN_SECONDS, poll_seconds: float = 0.5) -> None:
    """Of several processes that torchrun started: a thread that ends this one `seconds` after it lost its launcher."""
    if launched.processes() > 1 and launched.by_torchrun():
        threading.Thread(target=_watch_launcher, args=(os.getppid(), seconds, poll_seconds), daemon=True).start()


def _watch_launcher(launcher: int, seconds: float, poll_seconds: float) -> None:
    while os.getppid() == launcher:
        time.sleep(poll_seconds)
    time.sleep(seconds)
    if launched.rank() % launched.processes_here(launched.processes()) == 0:  # one of a machine
        text = f"the launcher (process {launcher}) is gone, so the processes can not go on together. {activity}. "
        print(f"error: {text}Start again with resume_from_checkpoint.", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Around the making of the process group, in which torch waits in silence for ddp_timeout. What fails there is
    raised as a RunError that says what to check."""
    if launched.processes() == 1:
        yield
        return
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    if launched.rank() == 0 and launched.processes_here(1) < launched.processes():
        print(f"hf-dist: {launched.processes()} processes of several machines meet at {place}", file=sys.stderr)
    try:
        yield
    except RuntimeError as error:
        is_of_network = any(word in str(error).lower() for word in ("connect", "timed out", "socket", "gloo", "nccl"))
        if isinstance(error, RunError) or is_about_a_peer(error) or not is_of_network:
            raise
        words = str(error).strip().splitlines()[0]
        raise RunError(f"the {launched.processes()} processes did not meet at {place}: {words} {CHECKS}") from error


# ---- a step that takes too long ----

_collective_timeout = timedelta(minutes=30)


def set_collective_timeout(seconds: float) -> None:
    """transformers 5.23 gives ddp_timeout to the process group unless use_cpu is set: gloo keeps its 30 minutes."""
    import torch.distributed as dist

    global _collective_timeout
    _collective_timeout = timedelta(seconds=seconds)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.distributed_c10d._set_pg_timeout(_collective_timeout)


def collective_timeout() -> timedelta:
    """Of a group that is made beside the default one."""
    return _collective_timeout


class Watchdog:
    """While entered, a thread that ends the process when `activity` lasts longer than `limit()` seconds. `store`: a
    connection of its own to the group's, as the default one may be busy setting up a collective; None: one process."""

    def __init__(self, limit: Callable[[], float], store: Any, poll_seconds: float = 0.5):
        self.limit, self.poll_seconds = limit, poll_seconds
        self._ended = threading.Event()
        self._store = store
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self.poll_seconds):
            limit = self.limit()
            if time.monotonic() - activity.since > limit:
                self._expire(limit)

    def _expire(self, limit: float) -> None:
        note = f"{activity} ({_where()})"
        try:
            notes = {launched.rank(): note} if self._store is None else exchange_notes(self._store, note)
        except RuntimeError:  # the store is gone with its rank, which may have told everyone's notes and ended
            said = f"nothing was finished for {limit:.0f} s: {note}. The rank that keeps the notes has ended."
            record(said)
            time.sleep(PEER_SECONDS)  # a launcher ends this process, with the line of the rank that ended
            print(f"error (rank {launched.rank()}): {said}", file=sys.stderr, flush=True)
            os._exit(1)
        text = report(notes, limit, launched.processes())
        record(text)
        if launched.rank() == min(notes):
            print(f"error: {text}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # the launcher ends the others: this line first
        else:
            time.sleep(1.5)
        os._exit(1)


def exchange_notes(store: Any, note: str) -> dict[int, str]:
    """rank -> note, of the ranks that left one within a moment."""
    store.set(f"stuck/{launched.rank()}", note)
    time.sleep(NOTE_SECONDS)
    names = {rank: f"stuck/{rank}" for rank in range(launched.processes())}
    return {rank: store.get(name).decode() for rank, name in names.items() if store.check([name])}


def report(notes: dict[int, str], limit: float, processes: int) -> str:
    text = f"nothing was finished for {limit:.0f} s. "
    text += "; ".join(f"rank {rank}: {note}" for rank, note in sorted(notes.items())) + ". "
    silent = [str(rank) for rank in range(processes) if rank not in notes]
    if silent:
        text += f"Rank {', '.join(silent)} does not answer: it was stopped, hangs outside of Python, or is gone. "
    return text + "One that waits for the others is not the cause. Raise step_timeout if a step may take so long."


def _where() -> str:
    """The innermost lines of the main thread that are not torch's."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    lines = [line for line in traceback.extract_stack(frame) if f"{os.sep}torch{os.sep}" not in line.filename]
    return " < ".join(f"{os.path.basename(at.filename)}:{at.lineno} {at.name}" for at in lines[: -FRAMES - 1 : -1])
