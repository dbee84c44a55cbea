"""With drafts accepted by chance, the engine's tokens are distributed as without any: by chi-square tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, make_small_checkpoint
from support.every_kind import core_of
from support.sampling import distribution, p_value
from support.scheduling import draft_always

VOCAB_SIZE = 20
"""As many log-probabilities as a request may ask for."""
NUM_REQUESTS, MOST = 3000, 2
PROMPT = [3, 9, 4]
SAMPLED: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "masks": {"temperature": 0.9, "top_p": 0.9, "top_k": 8, "min_p": 0.02},
    "penalty": {"temperature": 1.2, "presence_penalty": 1.5},
}


def make_checkpoint(folder: Path, tokenizer: Path, seed: int, other: Path | None = None, share: float = 0.0) -> Path:
    """A small model with random weights, and so much of them from another's."""
    make_small_checkpoint(folder)
    edit_json(folder / "config.json", vocab_size=VOCAB_SIZE)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    others = {} if other is None else load_file(other / "model.safetensors")
    tensors = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensor)
            continue
        shape = (VOCAB_SIZE, *tensor.shape[1:]) if len(tensor) == 32 else tensor.shape
        tensors[name] = torch.randn(shape, generator=generator) * (0.3 if "lm_head" in name else 0.5)
        if others:
            tensors[name] = share * others[name] + (1 - share) * tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, tokenizer = tmp_path_factory.mktemp("rejection"), checkpoint("tinypy") / "tokenizer.json"
    target = make_checkpoint(base / "target", tokenizer, 0)
    return {
        "target": target,
        "good": make_checkpoint(base / "good", tokenizer, 1, target, 0.9),
        "poor": make_checkpoint(base / "poor", tokenizer, 2),
    }


def make_llm(folder: Path, draft: Path | None = None, **settings: Any) -> LLM:
    speculative = None
    if draft is not None:
        speculative = {"model": str(draft), "acceptance": "rejection", "num_speculative_tokens": MOST}
    llm = LLM(
        folder, dtype="float32", max_model_len=32, device="cpu", max_num_seqs=128,
        speculative_config=speculative, **settings,
    )  # fmt: skip
    if draft is not None:
        draft_always(core_of(llm).scheduler, None, VOCAB_SIZE, MOST)
    return llm


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def logits(folders: dict[str, Path]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[V], [V, V] and [V, V, V]: of the first three tokens behind the prompt, by an engine without drafts."""
    prefixes = [[], *([a] for a in range(VOCAB_SIZE)), *([a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE))]
    llm = make_llm(folders["target"])
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=VOCAB_SIZE)
    outputs = llm.generate([PROMPT + prefix for prefix in prefixes], params, use_tqdm=False)
    llm.shutdown()
    rows = []
    for output in outputs:
        (entries,) = output.outputs[0].logprobs or ()
        rows.append([entries[token_id].logprob for token_id in range(VOCAB_SIZE)])
    logits_RV = torch.tensor(rows, dtype=torch.float64)
    size = VOCAB_SIZE
    return logits_RV[0], logits_RV[1 : 1 + size], logits_RV[1 + size :].view(size, size, size)


def joint_distribution(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    temperature: float,
    presence_penalty: float = 0.0,
    **masks: float,
) -> torch.Tensor:
    """[V, V, V] float64, of the first three tokens together."""

    def of(logits_V: torch.Tensor, *before: int) -> torch.Tensor:
        penalised_V = logits_V.clone()
        penalised_V[list(set(before))] -= presence_penalty
        return distribution(penalised_V / temperature, **masks)  # type: ignore[arg-type]

    first_V, second_VV, third_VVV = logits
    tokens = range(VOCAB_SIZE)
    p, q = of(first_V), torch.stack([of(second_VV[a], a) for a in tokens])
    r = torch.stack([torch.stack([of(third_VVV[a, b], a, b) for b in tokens]) for a in tokens])
    return torch.einsum("a,ab,abc->abc", p, q, r)


@pytest.mark.parametrize(("draft", "kind"), [("good", "plain"), ("poor", "masks"), ("poor", "penalty")])
def test_tokens_are_distributed_as_without_drafts(
    draft: str,
    kind: str,
    folders: dict[str, Path],
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    llm = make_llm(folders["target"], folders[draft])
    params = [SamplingParams(max_tokens=6, ignore_eos=True, seed=i, **SAMPLED[kind]) for i in range(NUM_REQUESTS)]  # type: ignore[arg-type]
    first, second, third, *_ = torch.tensor(generate(llm, [PROMPT] * NUM_REQUESTS, params)).unbind(1)
    drafts = llm.get_stats().drafts
    llm.shutdown()
    assert drafts is not None
    assert drafts.num_drafts > 1.5 * NUM_REQUESTS, "after a rejected draft too"
    share = drafts.num_accepted_tokens / drafts.num_draft_tokens
    assert 0.65 < share < 0.95 if draft == "good" else 0.05 < share < 0.5

    expected = joint_distribution(logits, **SAMPLED[kind])
    size = VOCAB_SIZE
    counts = torch.bincount((first * size + second) * size + third, minlength=size**3).view(size, size, size)
    for dim in range(3):  # two of the tokens together
        assert p_value(counts.sum(dim), expected.sum(dim)) > 1e-4


def test_greedy_requests_and_those_with_a_grammar_get_what_they_get_without_drafts(folders: dict[str, Path]) -> None:
    """Token for token, beside requests whose drafts are accepted by chance."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0, "structured_outputs": {"regex": "[!-*]{4,16}"}},
        {"structured_outputs": {"regex": "([!-+]{2} ?)+"}},
        {"ignore_eos": True},
    ]
    requests = [(kind, number) for number in range(8) for kind in kinds]
    params = [SamplingParams.from_mapping({"max_tokens": 16, "seed": seed, **kind}) for kind, seed in requests]
    prompts = [[*PROMPT, seed] for _, seed in requests]
    plain, llm = make_llm(folders["target"]), make_llm(folders["target"], folders["good"])
    expected, found = generate(plain, prompts, params), generate(llm, prompts, params)
    drafts = llm.get_stats().drafts
    assert drafts is not None
    assert drafts.num_accepted_tokens > 50
    is_equal = [one == other for one, other in zip(found, expected, strict=True)]
    for place, kind in enumerate(kinds[:3]):
        assert all(is_equal[place :: len(kinds)]), kind
    assert not all(is_equal[3 :: len(kinds)]), "these are accepted by chance"
    plain.shutdown()
    llm.shutdown()
