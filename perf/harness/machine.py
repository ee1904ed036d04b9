"""One line about the machine a number was measured on."""

import os
import platform
import time

import torch


def describe_machine() -> str:
    """Architecture, cores and torch's version and threads, with the date."""
    cores = len(os.sched_getaffinity(0))
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, torch {torch.__version__}"
