"""What every engine is asked to do: token ids in, so many tokens out, the same for each of them.

    python tests/benchmarks/workload.py        describes the workloads

`mixed` has prompts of 32 to 255 tokens and outputs of 16 to 127; `one_stream` is its first prompt alone, 128 out;
`shared_prefix` has 512 tokens that all prompts begin with, 16 to 63 of their own, and 16 out. Greedy, and no token ends
a request before its time. The warm-up's prompts begin like none that is measured. Random ids: what the engines compute
does not depend on sense, and a draft or a cache cannot guess them.

`copying` is one stream for the checkpoints whose name ends in `-walk` (checkpoints.py): 256 tokens out, most of which
stand in the prompt in the same order, as when a file is written again with edits. `copying_prompt` is its prompt with
one token out, so that the prompt's time can be taken off.

`long_prompts` is four prompts of 2,048 tokens with one token out: the rate of prompts. `long_context` is the decoding
of eight streams behind 3,000 tokens each: its warm-up runs the same prompts, which stay in the prefix cache.

A name that ends in `.json` is a file with the fields of a `Workload`.

Standard library only: the engines' own environments import this too.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WALK_LENGTH", "WORKLOADS", "Workload", "copying_task", "make_workload", "walk_order"]

FIRST_ID, END_ID = 2, 31_000
"""Below are special tokens; from here on there may be no tokens."""
COMMON_TOKENS = 512
WARM_UP_TOKENS = 16
"""Output of each warm-up request."""
WALK_LENGTH = END_ID - FIRST_ID
"""Tokens of the walk, which then begins again."""
COPYING_TOKENS, COPYING_PROMPT_TOKENS = 256, 768
KEPT_TOKENS, EDITED_TOKENS = (6, 40), (1, 5)
"""Bounds of the stretches that `copying` keeps, and of its edits; the upper one is excluded."""
LONG_PROMPT_TOKENS, CONTEXT_TOKENS = 2048, 3000


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

    @property
    def is_cached(self) -> bool:
        """The warm-up fills the prefix cache with the prompts, so that the clock sees decoding only."""
        return self.warm_up == self.prompts


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


def walk_order() -> list[int]:
    """All token ids but special ones, in the order in which a walk visits them: each is followed by the next."""
    order = list(range(FIRST_ID, END_ID))
    random.Random(3).shuffle(order)
    return order


def copying_task(number: int, num_tokens: int, num_prompt_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt, and what a walk makes of it: its own tokens again, edited.

    ::

        output    31 4 9 | 7  2  | 60 5 5 8 | 12        a stretch of the walk
        prompt    31 4 9 | 88    | 60 5 5 8 | 12 …  3   the same with other tokens here and there; the token before 31

    Args:
        number: tasks with different numbers have different outputs.
        num_tokens: length of the output.
        num_prompt_tokens: of the prompt; behind its version of the output come tokens that the output does not reach.

    Raises:
        ValueError: the walk has no such stretch left.
    """
    order, start = walk_order(), number * num_tokens
    if start + num_tokens >= WALK_LENGTH:
        raise ValueError(f"task {number} of {num_tokens} tokens is beyond the walk's {WALK_LENGTH}")
    rng = random.Random(number)
    output = order[start : start + num_tokens]
    strangers = sorted(set(order) - set(output))
    rng.shuffle(strangers)
    # Behind the output, which is a part of the text, the walk would go on with another task's output.
    source, edits = output + strangers[:num_prompt_tokens], strangers[num_prompt_tokens:]
    prompt: list[int] = []
    at = 0
    while len(prompt) < num_prompt_tokens - 1:
        kept = rng.randrange(*KEPT_TOKENS)
        prompt += source[at : at + kept]
        at += kept + rng.randrange(*EDITED_TOKENS) * rng.randrange(2)  # the output inserts or replaces these
        prompt += rng.sample(edits, rng.randrange(*EDITED_TOKENS) * rng.randrange(2))  # and drops these
    return [*prompt[: num_prompt_tokens - 1], order[start - 1]], output


def copying(num_requests: int) -> Workload:
    """One user, who wants a text again with some edits."""
    prompt, output = copying_task(0, COPYING_TOKENS, COPYING_PROMPT_TOKENS)
    return Workload([prompt], [len(output)], one_stream(num_requests).warm_up)


def copying_prompt(num_requests: int) -> Workload:
    """The same, without waiting for more than the first token."""
    return Workload(copying(num_requests).prompts, [1], one_stream(num_requests).warm_up)


def long_prompts(num_requests: int) -> Workload:
    """Prompts that take seconds."""
    rng = random.Random(4)
    stranger, *prompts = (_token_ids(rng, LONG_PROMPT_TOKENS) for _ in range(1 + min(num_requests, 4)))
    return Workload(prompts, [1] * len(prompts), [stranger])


def long_context(num_requests: int) -> Workload:
    """Streams whose steps read much of the KV cache."""
    rng = random.Random(5)
    prompts = [_token_ids(rng, CONTEXT_TOKENS) for _ in range(min(num_requests, 8))]
    return Workload(prompts, [96] * len(prompts), prompts)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "mixed": mixed,
    "one_stream": one_stream,
    "shared_prefix": shared_prefix,
    "copying": copying,
    "copying_prompt": copying_prompt,
    "long_prompts": long_prompts,
    "long_context": long_context,
}


def make_workload(name: str, num_requests: int = 64) -> Workload:
    """The workload of that name: always the same for the same number of requests."""
    if name.endswith(".json"):
        return Workload(**json.loads(Path(name).read_text()))
    return WORKLOADS[name](num_requests)


def _token_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def main() -> None:
    """Describe the workloads."""
    for name in WORKLOADS:
        workload = make_workload(name)
        print(
            f"{name:14} {len(workload.prompts):2} requests, "
            f"{workload.num_input_tokens:6,} tokens in, {workload.num_output_tokens:6,} out"
        )


if __name__ == "__main__":
    main()
