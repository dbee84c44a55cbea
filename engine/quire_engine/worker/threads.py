"""The number of threads that compute."""

import os

from quire_kernels import cpu

__all__ = ["configure_threads"]

PARAMETERS_PER_THREAD = 16_000_000
"""With fewer, a second thread does not pay: a step of the 5 M parameter demo model takes 6.0 ms with two threads and
7.0 ms with one on two idle cores, but 22.7 and 6.4 ms when something else runs, as every op waits for both threads."""


def configure_threads(num_parameters: int, num_ranks: int = 1, torch_computes: bool = False) -> int:
    """Set the number of threads by the size of the model and the cores this process may use.

    `OMP_NUM_THREADS` in the environment overrides this.

    Args:
        num_parameters: of this rank.
        num_ranks: processes that compute at the same time, and divide the cores among them.
        torch_computes: whether the model has a type or shape that only plain torch computes.

    Returns:
        The number of threads.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        num_threads = cpu.get_num_threads()
    else:
        num_cores = len(os.sched_getaffinity(0)) // num_ranks
        num_threads = max(1, min(num_cores, num_parameters // PARAMETERS_PER_THREAD))
    cpu.set_num_threads(num_threads, torch_computes=torch_computes)
    return num_threads
