"""The processor cores that a process may use."""

import os


def usable_cores() -> int:
    """How many there are; at least one."""
    # Linux alone can keep a process to some of them.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
