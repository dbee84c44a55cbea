"""What drafts that are looked up cost, and how many are accepted: prompt lookup and suffix decoding, without a model.

    python tests/benchmarks/proposers.py [--files 16] [--tokens 1000]

Prompts are 4096 tokens of Python's standard library, in tinypy's vocabulary, and go on as the file does.
The goals: 20 µs per request and token, with what is shared empty or full; 2 µs per token that is only taken in; 30 µs
whatever the text; 15 ms for a prompt of 100,000 tokens. Run it alone: other load shows in every figure.
"""

import argparse
import itertools
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quire_engine.messages import EngineCoreRequest
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.spec_decode.lookup import LookupProposer, NgramProposer
from quire_engine.spec_decode.match_index import RequestText
from quire_engine.spec_decode.suffix import SHARED_TOKENS, SuffixProposer
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model" / "tokenizer.json"
PROMPT_LENGTH = 4096
NUM_DRAFTS = 8
LONG_PROMPT = 100_000
CATCH_UP = 64

numbers = itertools.count()
Proposers = dict[str, Callable[[], LookupProposer]]


def ngram() -> NgramProposer:
    """With the lengths of vLLM's examples."""
    return NgramProposer(2, 4)


def suffix_alone() -> SuffixProposer:
    """Looks up the request's own text only."""
    return SuffixProposer(max_cached_requests=0)


def shared(outputs: Sequence[list[int]]) -> SuffixProposer:
    """Has as many outputs of others as it keeps."""
    proposer = SuffixProposer()
    num_tokens = 0
    while num_tokens < SHARED_TOKENS:
        for output in outputs:
            share(proposer, output)
            num_tokens += len(output)
    return proposer


def share(proposer: SuffixProposer, output: list[int]) -> None:
    """A request ends with this output."""
    request = new_request([0])
    request.all_token_ids += output
    proposer.forget(request)


def new_request(prompt: Sequence[int]) -> Request:
    """A request with a name of its own."""
    return Request(EngineCoreRequest(f"request-{next(numbers)}", [*prompt], SamplingParams(max_tokens=None)))


def one_by_one(proposer: LookupProposer, prompt: Sequence[int], output: Sequence[int], piece: int = 1) -> list[float]:
    """Seconds of each call but the first, if `piece` tokens come between two."""
    request = new_request(prompt)
    proposer.propose(request, NUM_DRAFTS)
    times = []
    for i in range(0, len(output) - piece + 1, piece):
        request.all_token_ids += output[i : i + piece]
        start = time.perf_counter()
        proposer.propose(request, NUM_DRAFTS)
        times.append(time.perf_counter() - start)
    return times


def decode(proposer: LookupProposer, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int, int, float]:
    """Calls, tokens proposed, tokens accepted, and how many the chances promised, for a model that says `output`."""
    request = new_request(prompt)
    num_calls = num_proposed = num_accepted = done = 0
    promised = 0.0
    while done < len(output):
        proposal = proposer.propose(request, NUM_DRAFTS)
        accepted, chance = 0, 1.0
        for token_id, came in zip(proposal.token_ids, output[done:], strict=False):
            if token_id != came:
                break
            accepted += 1
        for next_chance in proposal.chances:
            chance *= next_chance
            promised += chance
        num_calls += 1
        num_proposed += len(proposal.token_ids)
        num_accepted += accepted
        request.all_token_ids += output[done : done + accepted + 1]
        done += accepted + 1
    proposer.forget(request)
    return num_calls, num_proposed, num_accepted, promised


def print_times(name: str, times: list[float], per: float = 1.0) -> None:
    """In µs, `per` tokens each."""
    times = sorted(1e6 * t / per for t in times)
    print(
        f"  {name:44} {statistics.median(times):6.1f} µs   mean {statistics.mean(times):6.1f}   "
        f"99th percentile {times[int(len(times) * 0.99)]:6.1f}"
    )


def edited(source: str) -> str:
    """A file as someone edits it: a word is renamed throughout, and every 20th line is gone."""
    lines = source.replace("self", "this").splitlines(keepends=True)
    return "".join(line for i, line in enumerate(lines) if i % 20 != 19)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens of each request")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    sources = [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    random.Random(0).shuffle(sources)
    texts = [tokenizer.encode(source).ids for source in sources]
    is_long = [len(text) >= PROMPT_LENGTH + arguments.tokens for text in texts]
    chosen = [i for i, long_enough in enumerate(is_long) if long_enough][: arguments.files]
    others = [text for i, text in enumerate(texts) if i not in chosen]
    code = [(texts[i][:PROMPT_LENGTH], texts[i][PROMPT_LENGTH : PROMPT_LENGTH + arguments.tokens]) for i in chosen]
    edits = [(texts[i][:PROMPT_LENGTH], tokenizer.encode(edited(sources[i])).ids[: arguments.tokens]) for i in chosen]
    noise = random.Random(1)
    size = tokenizer.get_vocab_size()
    random_text = [(noise.choices(range(size), k=PROMPT_LENGTH), noise.choices(range(size), k=arguments.tokens))]
    full = shared(others)
    proposers: Proposers = {
        "ngram 2-4": ngram,
        "suffix, nothing shared": suffix_alone,
        "suffix, shared full": lambda: full,
    }

    print(f"per call, Python source, prompts of {PROMPT_LENGTH} tokens, one token between two calls")
    for name, make in proposers.items():
        proposer = make()
        print_times(name, [t for prompt, output in code for t in one_by_one(proposer, prompt, output)])

    print(f"per token, {CATCH_UP} tokens between two calls")
    for name, make in proposers.items():
        proposer = make()
        times = [t for prompt, output in code for t in one_by_one(proposer, prompt, output, CATCH_UP)]
        print_times(name, times, CATCH_UP)

    print("per call, the worst texts")
    length = PROMPT_LENGTH + arguments.tokens
    worst = {
        "one token": [5] * length,
        "two in turn": [5, 6] * (length // 2),
        "three at random": noise.choices([5, 6, 7], k=length),
    }
    for text_name, text in worst.items():
        for name in ("ngram 2-4", "suffix, shared full"):
            proposer = proposers[name]()
            if isinstance(proposer, SuffixProposer):
                for _ in range(4):
                    share(proposer, text)
            print_times(f"{text_name}: {name}", one_by_one(proposer, text[:PROMPT_LENGTH], text[PROMPT_LENGTH:]))

    print(f"first call with a prompt of {LONG_PROMPT} tokens, and a request's end with {arguments.tokens} to share")
    long_prompt = [token_id for text in others for token_id in text][:LONG_PROMPT]
    for name, make in proposers.items():
        starts, ends = [], []
        proposer = make()
        for _ in range(9):
            request = new_request(long_prompt)
            start = time.perf_counter()
            proposer.propose(request, NUM_DRAFTS)
            starts.append(time.perf_counter() - start)
            request.all_token_ids += code[0][1]
            start = time.perf_counter()
            proposer.forget(request)
            ends.append(time.perf_counter() - start)
        print(f"  {name:44} {1e3 * statistics.median(starts):6.1f} ms   {1e3 * statistics.median(ends):6.2f} ms")

    print("memory, bytes per token")
    for name in ("ngram 2-4", "suffix, nothing shared"):
        figures = []
        for num_tokens in (1000, PROMPT_LENGTH, LONG_PROMPT):
            proposer = proposers[name]()
            text_index = RequestText(proposer.lengths, proposer.window)
            text_index.extend(long_prompt[:num_tokens])
            figures.append(f"{text_index.num_bytes / num_tokens:5.1f} at {num_tokens}")
        print(f"  {name:44} {', '.join(figures)}")
    if full.shared is not None:
        each = full.shared.num_bytes / SHARED_TOKENS
        print(f"  {'shared':44} {each:5.1f}: {full.shared.num_bytes / 2**20:.1f} MiB for {SHARED_TOKENS} tokens")

    print(f"at most {NUM_DRAFTS} drafts: accepted of those proposed, accepted per call, and what the chances promised")
    for text_name, requests in (("edit of the prompt", edits), ("code", code), ("random", random_text)):
        for name in proposers:
            proposer = shared(others) if name == "suffix, shared full" else proposers[name]()
            figures_of_all = [decode(proposer, prompt, output) for prompt, output in requests]
            calls, proposed, accepted, promised = map(sum, zip(*figures_of_all, strict=True))
            print(
                f"  {text_name + ': ' + name:44} {accepted / max(proposed, 1):6.1%}  {accepted / calls:6.2f}  "
                f"{promised / calls:6.2f}"
            )


if __name__ == "__main__":
    main()
