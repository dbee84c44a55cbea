"""What each format costs a checkpoint in accuracy, and what llama.cpp makes of the same GGUF files.

    python tests/benchmarks/accuracy.py [--model FOLDER|smollm2|gemma3] [--tokens 16384] [--formats bfloat16 int8 …]
                                        [--types gguf q8_0 q4_k_m …] [--chats 20]

The formats are settings of `quire eval`, and its reference is the checkpoint in float32. With `--types` the same for
GGUF files of these types, beside `llama-perplexity` on the same file and text; `gguf` is the published file, of which
the others are made. With `--chats` both engines answer greedily from the published file: where two answers part, our
log-probabilities of the two tokens say whether that is rounding. Both need peers/setup.sh llamacpp.
"""

import argparse
import dataclasses
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import PUBLISHED, make_checkpoint
from executors import DEMO
from harness.engines import ENGINES, Job, RunError, cache_folder, prepare, run
from quire_engine import LLM, SamplingParams
from quire_engine.errors import RequestError
from quire_engine.frontend.chat_template import Conversation

WINDOW = 512
FORMATS = {
    "bfloat16": ["dtype=bfloat16"],
    "int8": ["dtype=bfloat16", "quantization=int8"],
    "int4": ["dtype=bfloat16", "quantization=int4"],
    "KV int8": ["dtype=bfloat16", "kv_cache_dtype=int8"],
}
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is a prime number?",
    "Write a short letter to a friend who has moved away.",
    "How do I boil an egg?",
    "Summarise the story of Cinderella.",
    "Name five animals that live in Africa.",
    "What is the difference between a list and a tuple in Python?",
    "Write a function that reverses a string.",
    "Who wrote Hamlet?",
    "Suggest a name for a black cat.",
    "What should I pack for a week in the mountains?",
    "Explain what an operating system does.",
    "Write the first sentence of a detective novel.",
    "How many minutes are in a day?",
]
CHAT_TOKENS = 64


class ProgramError(Exception):
    """A program failed; the last line that it printed."""


def output_of(*command: object) -> str:
    """What a program prints, errors too.

    Raises:
        ProgramError: it failed.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError((done.stderr.strip() or "no output").splitlines()[-1])
    return done.stdout + done.stderr


def read_perplexity(printed: str) -> float:
    """The estimate that `llama-perplexity` ends with.

    Raises:
        ProgramError: there is none.
    """
    found = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
    if found is None:
        raise ProgramError(f"no estimate: {printed.strip()[-200:]}")
    return float(found[1])


def first_difference(ours: Sequence[int], theirs: Sequence[int], eos: int | None) -> int | None:
    """Where two answers part; None if they do not before ours ends. llama.cpp goes on with another token than EOS."""
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine == eos:
            return None
        if mine != other:
            return i
    return None


class Comparison:
    """One checkpoint and one text, in both engines."""

    def __init__(self, job: Job, text: Path, num_tokens: int) -> None:
        self.job, self.text, self.num_tokens = job, text, num_tokens
        self.programs = job.peers / "llamacpp" / "bin"

    def row(self, label: str, settings: Sequence[str], type_name: str | None = None) -> str:
        """A line of the table: the checkpoint with these settings, or a GGUF file of that type in both engines."""
        theirs = None
        try:
            file = self.job.model
            if type_name is not None:
                file = self.make_file(type_name)
                theirs = self._llama_perplexity(file)
            ours = self._ours(file, settings)
        except (ProgramError, RunError) as error:  # not offered, not installed, or the tokens of the text differ
            return f"| {label} | {error} | | | |"
        rest = ["", ""] if theirs is None else [f"{theirs:.3f}", f"{ours['perplexity'] / theirs - 1:+.2%}"]
        return f"| {label} | {ours['perplexity']:.3f} | {' | '.join(rest)} | {ours['top1_agreement']:.1%} |"

    def make_file(self, type_name: str) -> Path:
        """The checkpoint as a GGUF file of that type.

        Raises:
            RunError: llama.cpp cannot make it, or is not installed.
        """
        engine = next(engine for engine in ENGINES if engine.name == "llamacpp-gguf")
        prepare(dataclasses.replace(engine, variant=type_name), self.job, self.text.with_name(f"{type_name}.log"))
        if type_name == "gguf":
            return self.job.model / "model.gguf"
        return self.job.cache / "converted" / "llamacpp" / f"{self.job.model.name}-{type_name}.gguf"

    def chat_lines(self, num_chats: int) -> list[str]:
        """Both engines' tokens of the text, and their greedy answers: what is different in them."""
        file, folder = self.make_file("gguf"), self.text.parent
        llm = LLM(file, dtype="bfloat16", max_model_len=1024)
        tokenizer = llm._inputs.tokenizer
        try:
            options = ("--file", self.text, "--ids", "--no-escape", "--log-disable")
            printed = output_of(self.programs / "llama-tokenize", "--model", file, *options)
            theirs = json.loads(printed[printed.index("[") : printed.index("]") + 1])
            is_same = tokenizer.encode(self.text.read_text()) == theirs
            lines = [f"The {len(theirs):,} tokens of the text are {'the same' if is_same else 'different'}."]
            prompts = [_chat_prompt(llm, chat) for chat in CHATS[:num_chats]]
            workload = {"prompts": prompts, "output_lengths": [CHAT_TOKENS] * len(prompts), "warm_up": [[2, 3, 4]]}
            (folder / "chats.json").write_text(json.dumps(workload))
            job = dataclasses.replace(self.job, workloads=[str(folder / "chats.json")], outputs=True)
            answers = {
                engine.name: run(engine, job, folder / f"{engine.name}.log")[0].outputs or []
                for engine in ENGINES
                if engine.variant == "gguf"
            }
            pairs = zip(prompts, answers["quire-gguf"], answers["llamacpp-gguf"], strict=True)
            for number, (prompt, mine, other) in enumerate(pairs):
                at = first_difference(mine, other, tokenizer.eos_token_id)
                if at is not None:
                    words = _describe_tokens(llm, prompt + mine[:at], (mine[at], other[at]))
                    lines.append(f"- chat {number}, token {at}: ours {words[0]}, theirs {words[1]}")
        finally:
            llm.shutdown()
        return [lines[0], f"{len(prompts) - len(lines) + 1} of {len(prompts)} answers are equal.", *lines[1:]]

    def _ours(self, file: Path, settings: Sequence[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "quire_cli", "eval", file, *settings, "--text", self.text, "--json"]
        command += ["--tokens", self.num_tokens, "--window", WINDOW]
        command += ["--reference", self.job.model, "--reference-setting", "dtype=float32"]
        printed = output_of(*command)
        figures: dict[str, Any] = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        return figures

    def _llama_perplexity(self, file: Path) -> float:
        options = ["--ctx-size", WINDOW, "--chunks", self.num_tokens // WINDOW, "--threads", self.job.threads]
        program = self.programs / "llama-perplexity"
        return read_perplexity(output_of(program, "--model", file, "--file", self.text, *options))


def _chat_prompt(llm: LLM, chat: str) -> list[int]:
    try:
        return llm._inputs.apply_chat_template(Conversation([{"role": "user", "content": chat}]))
    except RequestError:  # a base model has no template
        return llm._inputs.tokenizer.encode(chat)


def _describe_tokens(llm: LLM, prompt: list[int], token_ids: Sequence[int]) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    logprobs = (output.outputs[0].logprobs or [{}])[0]
    chances = [f"{logprobs[one].logprob:.3f}" if one in logprobs else "not among 20" for one in token_ids]
    words = [llm._inputs.tokenizer.decode([one]) for one in token_ids]
    return [f"{word!r} ({chance})" for word, chance in zip(words, chances, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help=f"a folder, or {' or '.join(PUBLISHED)}")
    parser.add_argument("--tokens", type=int, default=16384, help=f"a multiple of {WINDOW}")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--types", nargs="*", default=[], help="of GGUF: gguf, q8_0, q4_k_m and others")
    parser.add_argument("--chats", type=int, default=0, help=f"up to {len(CHATS)}; needs a published GGUF file")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    arguments = parser.parse_args()
    is_published = arguments.model in PUBLISHED
    model = make_checkpoint(arguments.model, arguments.cache / "checkpoints") if is_published else Path(arguments.model)
    peers = Path(os.environ.get("QUIRE_BENCH_PEERS") or arguments.cache / "peers")
    job = Job(model=model, workloads=["mixed"], cache=arguments.cache, peers=peers, threads=arguments.threads)
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        text = Path(folder) / "text"
        topics = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        text.write_text(re.sub(" +", " ", topics))  # llama.cpp cuts runs of spaces otherwise than Gemma's tokenizer
        comparison = Comparison(job, text, arguments.tokens)
        print(f"{model.name}, {arguments.tokens:,} tokens\n")
        print("| format | perplexity | llama.cpp's | ours ÷ its | most likely token as in float32 |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name in arguments.formats:
            print(comparison.row(name, FORMATS[name]), flush=True)
        for name in arguments.types:
            print(comparison.row(name, ["dtype=bfloat16"], name), flush=True)
        if arguments.chats:
            print("\n" + "\n".join(comparison.chat_lines(arguments.chats)))


if __name__ == "__main__":
    main()
