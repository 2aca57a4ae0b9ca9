"""Freed memory that stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

# Pages that the system had to provide while 48 MB were freed and asked for again 20 times.
FAULTS = """
import resource
import numpy as np
from tf_teaforn.cli.malloc import keep_freed_memory

keep_freed_memory()
counts = []
for _ in range(21):
    np.empty(48 * 2**20, "int8").fill(1)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone hands it back")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(environment):
    hidden = ("MALLOC_", "GLIBC_TUNABLES")
    others = {name: os.environ[name] for name in os.environ if not name.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=others | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    faults = int(done.stdout)
    # At least one for each 2 MB of the 20 arrays.
    assert faults >= 480 if environment else faults < 48
