"""What every rank does for itself, and what ends all of them, each with the cause, when one fails.

(1) `together`: an action on every rank, then one gather; an error of one is raised on all. `check_same`: an error on
    all where they would not train the same run
(2) `unseen`: what one machine wrote is waited for on the others, since a network file system may show it later
(3) `ends_together`: around code of others (Trainer's saving) in which ranks both write alone and wait for each other.
    An error is told through the group's store, as ranks may be inside of collectives. Who has finished waits there for
    the others; who is inside of a collective of which the failed rank is no longer part leaves with it, or is ended
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.failures import is_about_a_peer, record
from hf_dist_ext.strategies import collectives

SEEN_SECONDS = 90.0  # NFS asks again after 60 at the latest what a folder holds
LEAVE_SECONDS = 10.0  # for a rank to come out of a collective that a failed rank has left
SHOWN = 4  # differences between ranks
TOLD_SECONDS = 5.0  # for the others to hear of an error: the store may end with the rank that failed

# ---- (1) ----


def together(action: Callable[[], Any], group: Any = None) -> list:
    """What `action` returns on every rank, on every rank. An error of one is raised on all: nobody waits in vain."""
    result = error = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if collectives.world_size() == 1:
        if error is not None:
            raise error
        return [result]
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (result, None if error is None else _in_words(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, words) in enumerate(answers):
        if words is not None:
            raise _of_rank(rank, words)
    return [result for result, _ in answers]


def _in_words(error: BaseException) -> list:
    """Not every exception can be pickled."""
    return [isinstance(error, UsageError), str(error) or repr(error)]


def _of_rank(rank: int, words: list) -> Exception:
    is_usage, text = words
    return (UsageError if is_usage else RunError)(f"rank {rank}: {text}")


def check_same(facts: Mapping[str, Any]) -> None:
    """UsageError on every rank for the names whose values are not the same on all. Every rank must call it."""
    words = {name: repr(value) for name, value in facts.items()}
    own = hashlib.blake2b(repr(sorted(words.items())).encode(), digest_size=7).digest()
    if len({digest for (digest,) in collectives.exchange([int.from_bytes(own, "big")])}) == 1:
        return
    first, *others = together(lambda: words)
    found = {}
    for rank, said in enumerate(others, start=1):
        for name in sorted(first.keys() | said.keys()):
            before, now = (_in_short(one.get(name, "not given")) for one in (first, said))
            if first.get(name) != said.get(name):
                found.setdefault(name, f"{name} is {before} on rank 0 and {now} on rank {rank}")
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    raise UsageError(
        f"the processes would not train the same run: {'; '.join(list(found.values())[:SHOWN])}{more}. Start all of "
        "them with the same run file, fields, code and data."
    )


def _in_short(words: str) -> str:
    return (
        words
        if len(words) < 60
        else f"{words[:40]} ... ({hashlib.blake2b(words.encode(), digest_size=4).hexdigest()})"
    )


# ---- (2) ----


def wait_until_well(look: Callable[[], str]) -> str:
    """Ask `look` what is wrong until nothing is, or time is over; what it said last."""
    deadline, pause = time.monotonic() + SEEN_SECONDS, 0.05
    while (words := look()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 2.0)
    return words


def unseen(look: Callable[[], str]) -> str:
    """What machines still miss, by the words of `look`, when time is over; empty when all see everything. Every rank
    must call it; one process of each machine looks."""
    is_first = collectives.rank() % collectives.processes_here() == 0
    missed = together(lambda: wait_until_well(look) if is_first else "")
    hosts = together(socket.gethostname)
    return "; ".join(f"rank {rank} on {hosts[rank]}: {words}" for rank, words in enumerate(missed) if words)


# ---- (3) ----

_uses = itertools.count()  # ranks of a group enter in the same order


@contextlib.contextmanager
def ends_together(what: str, seconds: float) -> Iterator[None]:
    """Leaving it without an error means that no rank had one. `seconds`: how long one rank may wait for the others."""
    if collectives.world_size() == 1:
        yield
        return
    news = _News(f"ended/{next(_uses)}", what)
    try:
        yield
    except BaseException as error:
        if not is_about_a_peer(error):
            news.tell(error)
            raise
        # the connection may be found closed a moment before the words are found that say why
        raise (news.heard(TOLD_SECONDS) or error) from error
    else:
        news.wait_for_all(seconds)
    finally:
        news.has_left.set()


class _News:
    """Of one stretch, in the group's store: who failed, and how many have finished."""

    def __init__(self, key: str, what: str):
        self.key, self.what, self.words = key, what, None
        self.store = collectives.store_of_group()
        self.has_left, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, error: BaseException) -> None:
        self.has_left.set()
        with contextlib.suppress(RuntimeError), self._lock:  # the store may be gone with its rank
            if not self.store.check([f"{self.key}/failed"]):
                words = [collectives.rank(), _in_words(error)]
                self.store.set(f"{self.key}/failed", json.dumps(words))
            deadline = time.monotonic() + TOLD_SECONDS
            while self.store.add(f"{self.key}/told", 0) < dist.get_world_size() - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    def heard(self, seconds: float = 0.0) -> Exception | None:
        """The error of another rank, once there is one."""
        deadline = time.monotonic() + seconds
        while self._listen() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return None if self.words is None else _of_rank(*self.words)

    def _listen(self) -> list | None:
        with contextlib.suppress(RuntimeError), self._lock:
            if self.words is None and self.store.check([f"{self.key}/failed"]):
                self.words = json.loads(self.store.get(f"{self.key}/failed"))
                self.store.add(f"{self.key}/told", 1)
        return self.words

    def wait_for_all(self, seconds: float) -> None:
        deadline, pause = time.monotonic() + seconds, 0.001
        with self._lock:
            self.store.add(f"{self.key}/done", 1)
        while True:
            if (error := self.heard()) is not None:
                raise error
            with self._lock:
                if self.store.add(f"{self.key}/done", 0) == dist.get_world_size():
                    return
            if time.monotonic() > deadline:
                raise RunError(f"{self.what}: other ranks did not finish within {seconds:.0f} s.")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _watch(self) -> None:
        while not self.has_left.wait(1.0):
            if self._listen() is None:
                continue
            if self.has_left.wait(LEAVE_SECONDS):
                return
            error = _of_rank(*self.words)
            record(str(error))
            print(f"error (rank {collectives.rank()}): {self.what}: {error}", file=sys.stderr, flush=True)
            os._exit(2 if isinstance(error, UsageError) else 1)
