"""What each format costs a checkpoint in accuracy: perplexity, and how often the most likely token is that of float32.

    python tests/benchmarks/accuracy.py [--model FOLDER] [--tokens 2048] [--formats float32 bfloat16 int8 int8-kv]

The text is the Python language reference that comes with Python (`pydoc_data.topics`), in windows of 256 tokens, whose
every token is predicted from those before it.
"""

import argparse
import math
import pydoc_data.topics
from pathlib import Path

from executors import DEMO
from quire_engine import LLM, SamplingParams

WINDOW = 256
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


def score(model: Path, num_tokens: int, settings: dict[str, str]) -> tuple[float, list[int]]:
    """Perplexity, and the most likely token at each place.

    Raises:
        ValueError: the text has fewer tokens.
    """
    llm = LLM(model, max_model_len=WINDOW + 1, **settings)
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    token_ids = llm._inputs.tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) < num_tokens:
        raise ValueError(f"--tokens is {num_tokens}; the text has {len(token_ids)}")
    prompts = [token_ids[begin : begin + WINDOW] for begin in range(0, num_tokens, WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    losses, best = [], []
    for output in llm.generate(prompts, params):
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token_id].logprob)
            best.append(next(number for number, one in entry.items() if one.rank == 1))
    llm.shutdown()
    return math.exp(sum(losses) / len(losses)), best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    _, reference = score(arguments.model, arguments.tokens, FORMATS["float32"])
    for name in arguments.formats:
        perplexity, best = score(arguments.model, arguments.tokens, FORMATS[name])
        agreement = sum(a == b for a, b in zip(best, reference, strict=True)) / len(reference)
        print(f"{name:9} perplexity {perplexity:8.3f}, most likely token as in float32 {agreement:.4f}", flush=True)


if __name__ == "__main__":
    main()
