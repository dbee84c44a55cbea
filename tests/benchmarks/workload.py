"""What every engine is asked to do: token ids in, so many tokens out, the same for each of them.

    python tests/benchmarks/workload.py        describes the workloads

`mixed` has prompts of 32 to 255 tokens and outputs of 16 to 127; `one_stream` is its first prompt alone, 128 out;
`shared_prefix` has 512 tokens that all prompts begin with, 16 to 63 of their own, and 16 out. Greedy, and no token ends
a request before its time. The warm-up's prompts begin like none that is measured. Random ids: what the engines compute
does not depend on sense, and a draft or a cache cannot guess them.

Standard library only: the engines' own environments import this too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["WORKLOADS", "Workload", "make_workload"]

FIRST_ID, END_ID = 2, 31_000
"""Below are special tokens; from here on there may be no tokens."""
COMMON_TOKENS = 512
WARM_UP_TOKENS = 16
"""Output of each warm-up request."""


@dataclass(frozen=True)
class Workload:
    """Requests that come all at once."""

    prompts: list[list[int]]
    output_lengths: list[int]
    warm_up: list[list[int]]
    """Prompts of the requests that run before the clock starts, with `WARM_UP_TOKENS` each."""

    @property
    def num_input_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Of all outputs."""
        return sum(self.output_lengths)


def mixed(num_requests: int) -> Workload:
    """Many users at once."""
    rng = random.Random(0)
    strangers = [_token_ids(rng, rng.randrange(32, 256)) for _ in range(num_requests)]
    output_lengths = [rng.randrange(16, 128) for _ in range(num_requests)]
    rng = random.Random(1)
    prompts = [_token_ids(rng, len(stranger)) for stranger in strangers]  # as long as the strangers', other ids
    return Workload(prompts, output_lengths, strangers[:2])


def one_stream(num_requests: int) -> Workload:
    """One user, who waits for every token."""
    many = mixed(max(num_requests, 2))
    return Workload(many.prompts[:1], [128], many.warm_up)


def shared_prefix(num_requests: int) -> Workload:
    """The same instructions before every question."""
    rng = random.Random(2)
    common = _token_ids(rng, COMMON_TOKENS)
    prompts = [common + _token_ids(rng, rng.randrange(16, 64)) for _ in range(num_requests)]
    return Workload(prompts, [16] * num_requests, [_token_ids(rng, 64) for _ in range(2)])


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "mixed": mixed,
    "one_stream": one_stream,
    "shared_prefix": shared_prefix,
}


def make_workload(name: str, num_requests: int = 64) -> Workload:
    """The workload of that name: always the same for the same number of requests."""
    return WORKLOADS[name](num_requests)


def _token_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def main() -> None:
    """Describe the workloads."""
    for name in WORKLOADS:
        workload = make_workload(name)
        print(
            f"{name:13} {len(workload.prompts):2} requests, "
            f"{workload.num_input_tokens:6,} tokens in, {workload.num_output_tokens:6,} out"
        )


if __name__ == "__main__":
    main()
