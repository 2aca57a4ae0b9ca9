"""The processor cores that a process may use."""

import os


def usable_cores() -> list[int]:
    """Their numbers, ascending; at least one."""
    # Linux alone can keep a process to some of them.
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
