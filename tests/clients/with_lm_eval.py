"""lm-eval's log-likelihoods of a task of our own, through /v1/completions, beside transformers' in float32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, V1, main

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
FOLDER = sys.argv[3]
QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " a large grey elephant"]),
    ("Two plus two is", [" four", " five", " twenty-two, or so"]),
    ("Ice is made of", [" water", " wood", " 日本 and é"]),
]
# Ours has torch and transformers; what lm-eval brings along has not.
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
for prompt, rest in json.load(sys.stdin):
    logits = model(torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None])
    print(json.dumps([scores.sum().item(), logits.argmax(-1).tolist() == rest]))
"""


def evaluate() -> Any:
    from datasets import Dataset, DatasetDict
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    rows = [{"question": question, "choices": choices, "label": 0} for question, choices in QUESTIONS]
    task = ConfigurableTask(config={
        "task": "ours", "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "question",
        "doc_to_choice": "choices", "doc_to_target": "label", "target_delimiter": "",
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
    })  # fmt: skip
    arguments = {"model": MODEL, "base_url": f"{V1}/completions", "tokenizer_backend": "huggingface",
                 "tokenizer": FOLDER, "num_concurrent": 2}  # fmt: skip
    return simple_evaluate("local-completions", model_args=arguments, tasks=[task], log_samples=True, bootstrap_iters=0)


class Checks:
    def loglikelihood(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        samples = sorted(evaluate()["samples"]["ours"], key=lambda sample: sample["doc_id"])
        found = [score for sample in samples for score in sample["filtered_resps"]]
        pairs = []
        for question, choices in QUESTIONS:
            prompt = tokenizer(question)["input_ids"]
            pairs += [(prompt, tokenizer(question + choice)["input_ids"][len(prompt) :]) for choice in choices]
        python = Path(sys.prefix).parent / "bin" / "python"
        command = [python, "-c", REFERENCE, FOLDER]
        done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        expected = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(found) == len(expected) == 9
        for (score, is_greedy), (reference, is_likeliest) in zip(found, expected, strict=True):
            assert abs(score - reference) < 1e-3, (found, expected)
            assert is_greedy == is_likeliest


main("lm_eval", Checks())
