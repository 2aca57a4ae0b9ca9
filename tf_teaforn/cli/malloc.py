"""The memory that glibc's malloc keeps for itself."""

import ctypes
import os

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory():
    """From here on, the process keeps the memory that it frees, for what it needs next.

    glibc hands every block of 32 MB or more back to the system, and then the free end of its heap.
    A step on a CPU frees its logits and asks for as much again, and the system clears each page
    anew: up to a third of the processor time of a step.

    Nothing happens where malloc is not glibc's, nor where the environment sets options of it (man
    mallopt): who does so has settled the matter.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
