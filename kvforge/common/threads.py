"""How many threads arithmetic takes: what is asked for, else no more than a container has of the machine's cores."""

import os
from pathlib import Path

from kvforge.common.errors import KvforgeError

ENVIRONMENT = "OMP_NUM_THREADS"
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores_of_quota(file: Path = QUOTA) -> float | None:
    """Return the cores that the control group has time for, None where it is not bounded or not known."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max", too
        return None


def set_threads(asked: int | None, quota: Path = QUOTA) -> None:
    """Put the number of threads where OpenMP finds it, in this process, before it imports torch, and in those that it
    starts: ``asked``, else $OMP_NUM_THREADS as it is, else the whole cores of the quota where it has fewer than the
    process may run on. More threads than cores wait for each other at every step.

    Raises KvforgeError where less than one is asked for.
    """
    if asked is not None:
        if asked < 1:
            raise KvforgeError(f"--threads is {asked}; give 1 or more.")
        os.environ[ENVIRONMENT] = str(asked)
    elif not os.environ.get(ENVIRONMENT):  # empty, as a file of settings may leave it, says nothing
        cores = cores_of_quota(quota)
        if cores is not None and cores < len(os.sched_getaffinity(0)):
            os.environ[ENVIRONMENT] = str(max(int(cores), 1))
