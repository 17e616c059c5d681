"""What programs for chips that are not here set before they import JAX."""

from __future__ import annotations

import os


def start_no_chip() -> None:
    """No back end of a chip is started. Only for a process of its own: programs of later
    tests would read the variables.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
