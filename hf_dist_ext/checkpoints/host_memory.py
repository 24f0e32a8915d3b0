"""How much more memory the processes of this machine may take: what the system has left, and what a container's or a
job's limit (cgroup, version 1 or 2) leaves of it. No torch here."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

LIMITS = {  # of a version: its limit, what counts towards it, and the part of that which the system takes back
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """`root` is where /proc and /sys are looked for."""
    return min([psutil.virtual_memory().available, *_left_by_limits(root)])


def _left_by_limits(root: Path) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # only Linux has them
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                version = 1 if controllers else 2
                mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
                # A limit holds for all groups below. In a container the path may be the host's; the mount is its own.
                folder = mount / path.strip("/")
                for group in [folder, *(above for above in folder.parents if above.is_relative_to(mount))]:
                    found += _left_in(group, *LIMITS[version])
    return found


def _left_in(group: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # no such group; "max"
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / usage).read_text()) - int(statistics.get(reclaimable, 0))
        return [max(0, int((group / limit).read_text()) - used)]
    return []
