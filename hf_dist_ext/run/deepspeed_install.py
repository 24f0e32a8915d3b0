"""Whether the DeepSpeed that is installed can be used; asked before any rank exists, and by every rank.

On a machine without an accelerator it compiles an operation for its collectives at the first start, a minute or two.
"""

from __future__ import annotations

import logging
import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError

logger = logging.getLogger(__name__)

# 0.19.0 and older drop gradients of all backwards but the last (ZeRO-1/2 with offloading); up to 0.19.7 the -1 that
# stands for a gradient norm of NaN becomes 1, and the update is applied.
FLOOR = "0.19.8"
SHARED_MEMORY_OP = "deepspeed_shm_comm"


def check(what: str = "") -> None:
    """Raises UsageError, which begins with `what` needs it."""
    if find_spec("deepspeed") is None:
        raise UsageError(f"{what}DeepSpeed is not installed. Run: pip install -e '.[deepspeed]'")
    check_version(version("deepspeed"), what)


def check_version(version: str, what: str = "") -> None:
    from packaging.version import Version

    if Version(version) < Version(FLOOR):
        raise UsageError(
            f"{what}DeepSpeed {version} is older than {FLOOR}; older ones lose gradients in a step "
            "of several backwards, or apply updates that are not finite. Run: pip install -e '.[deepspeed]'"
        )


def why_unusable() -> str | None:
    try:
        check()
    except UsageError as error:
        return str(error)
    return None


def prepare_cpu() -> None:
    """Before the process group of a machine without an accelerator: without a compiler, gloo does all collectives."""
    from deepspeed import ops

    missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    if missing and ops.__compatible_ops__.get(SHARED_MEMORY_OP):
        ops.__compatible_ops__[SHARED_MEMORY_OP] = False
        if launched.rank() == 0:
            logger.warning(f"{' and '.join(missing)} not found: DeepSpeed's collectives go over gloo alone, slower.")
