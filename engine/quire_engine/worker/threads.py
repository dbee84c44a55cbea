"""The number of threads that compute."""

import os

from quire_kernels import cpu

PARAMETERS_PER_THREAD = 16_000_000
"""With fewer, a second thread does not pay: a step of the 5 M parameter tinypy takes 6.0 ms with two threads and
7.0 ms with one on two idle cores, but 22.7 and 6.4 ms when something else runs, as every op waits for both threads."""

PROMPT_PARAMETERS_PER_THREAD = 2_000_000
"""Likewise for models that compute nothing but prompts, in steps of some hundred tokens or more: 5,025 tokens of
tinypy take 0.57 s with one thread and 0.31 with two."""


def configure_threads(
    num_parameters: int,
    num_ranks: int = 1,
    torch_computes: bool = False,
    num_replicas: int = 1,
    can_generate: bool = True,
) -> int:
    """Set the number of threads by the size of the model and the cores this process may use, and return it.
    `OMP_NUM_THREADS` in the environment overrides this. ValueError if it gives replicas more threads than there are
    cores: they would compute in each other's cores.

    Args:
        num_parameters: of this rank.
        num_ranks: processes that compute at the same time, and divide the cores among them.
        torch_computes: whether the model has a type or shape that only plain torch computes.
        num_replicas: engines that these ranks make.
        can_generate: whether there are steps of one token per request.
    """
    num_cores = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    if os.environ.get("OMP_NUM_THREADS"):
        num_threads = cpu.get_num_threads()
        if num_replicas > 1 and num_threads > num_cores:
            raise ValueError(
                f"data_parallel_size is {num_replicas} with OMP_NUM_THREADS={num_threads}: each of {num_ranks} ranks "
                f"has {num_cores} of {len(os.sched_getaffinity(0))} cores; set it to at most {num_cores}, or leave it "
                "unset"
            )
    else:
        each = PARAMETERS_PER_THREAD if can_generate else PROMPT_PARAMETERS_PER_THREAD
        num_threads = max(1, min(num_cores, num_parameters // each))
    cpu.set_num_threads(num_threads, torch_computes=torch_computes)
    return num_threads
