"""The machine a number was measured on, in words."""

import os
import platform
import time

import torch


def describe_machine() -> str:
    """Architecture, cores and torch's version, with the date."""
    cores = len(os.sched_getaffinity(0))
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, torch {torch.__version__}"


def describe_threads() -> str:
    """Architecture, torch's threads and its version."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def machine_fields() -> dict[str, str]:
    """Architecture and torch's version, as the fields of a report."""
    return {"machine": platform.machine(), "torch": torch.__version__}
