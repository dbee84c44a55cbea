"""What is shown of every family: one test for each cell of the table in docs/models.md (`support.families`). By default
two cells that an engine can show at once are one test; and what the engine does with all layers of a kind alike is
shown of some family that has such layers."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.core.journal import Journal
from quire_engine.messages import EngineCoreRequest
from quire_engine.models import CheckpointConfig
from quire_engine.models.options import AttentionOptions, ModelOptions
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.outputs import RequestOutput
from quire_engine.spec_decode import make_proposer
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import cpu
from support.every_kind import core_of
from support.families import COLUMNS, FAMILIES, OF_EACH_KIND, PAGE, PAIRS, rendered, with_table
from support.full import FULL
from support.oracle import VOCAB_SIZE, Expected, assert_exact, expected_outputs, make_prompts
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always

NUM_TOKENS = 12
REPLAY_AFTER = 10
PROMPTS = [*make_prompts(7, VOCAB_SIZE, max_length=40), *make_prompts(1, VOCAB_SIZE, max_length=400, seed=3)]
"""The last one's step is too long to be recorded; the others' are recorded."""


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)


Family = tuple[Path, list[Expected]]


@pytest.fixture
def family(
    architecture: str,
    checkpoint: Callable[[str], Path],
    made: Callable[[str, Callable[[Path], object]], Path],
) -> Family:
    """A checkpoint, and what transformers makes of the prompts with it."""
    folder, name = checkpoint(FAMILIES[architecture]), f"{FAMILIES[architecture]}-in-short"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]  # which is the oracle's

    def ask_transformers(file: Path) -> None:
        said = expected_outputs(name, folder, PROMPTS, [NUM_TOKENS] * len(PROMPTS))
        file.write_text(json.dumps([asdict(one) for one in said]))

    said = json.loads(made(f"{name}.json", ask_transformers).read_text())
    return folder, [Expected(**one) for one in said]


@contextmanager
def make_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    sizes = {"max_model_len": 448, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**22}
    with llm_of_thread_ranks(folder, dtype="float32", **{"enable_prefix_caching": False, **sizes, **settings}) as llm:
        yield llm


def generate(llm: LLM, num_tokens: int = NUM_TOKENS) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)
    assert llm.get_stats().num_failed_steps == 0
    return outputs


SCORES: dict[Path, torch.Tensor] = {}
"""Of checkpoints in float32, for the comparison with int8."""


def prompt_scores(llm: LLM) -> torch.Tensor:
    """The log-probability of each token of the prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return torch.tensor([
        next(iter(one.values())).logprob for output in outputs for one in (output.prompt_logprobs or ())[1:]
    ])  # fmt: skip


def check_exact(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    folder, expected = family
    with caplog.at_level(logging.INFO, RecordedForward.__module__), make_llm(folder) as llm:
        assert_exact(generate(llm), expected)
        SCORES[folder] = prompt_scores(llm)
    if cpu.library() is not None:
        assert "op by op" not in caplog.text


def check_ranks(family: Family, _: pytest.LogCaptureFixture, **sizes: int) -> None:
    """Ranks that are threads take long for a step, and each step after the prompts' is computed alike."""
    folder, expected = family
    number = NUM_TOKENS if FULL else 4
    with make_llm(folder, **sizes) as llm:
        outputs = generate(llm, number)
    assert_exact(outputs, [Expected(one.token_ids[:number], one.logprobs[:number]) for one in expected])


def check_int8(family: Family, _: pytest.LogCaptureFixture) -> None:
    """Near to float32, and not the same."""
    folder, _ = family
    if folder not in SCORES:
        with make_llm(folder) as llm:
            SCORES[folder] = prompt_scores(llm)
    with make_llm(folder, quantization="int8") as llm:
        error = (prompt_scores(llm) - SCORES[folder]).abs().mean() / SCORES[folder].std()
    has_states = CheckpointConfig.from_folder(folder).state_tokens > 0  # which add up the noise of a sequence
    assert 0.0005 < error < (0.2 if has_states else 0.1), "int8 was not used, or something is left out"


def check_twice(family: Family, _: pytest.LogCaptureFixture, is_drafting: bool, is_caching: bool) -> None:
    """The second time, the first time's tokens are what is drafted, and their blocks what is found."""
    folder, expected = family
    drafts = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}} if is_drafting else {}
    with make_llm(folder, enable_prefix_caching=is_caching, **drafts) as llm:
        if is_drafting:
            scheduler = core_of(llm).scheduler
            assert scheduler.config.speculative_config is not None
            draft_always(scheduler, make_proposer(scheduler.config.speculative_config), VOCAB_SIZE, 3)
        for _ in range(2):
            assert_exact(generate(llm), expected)
        stats = llm.get_stats()
    assert not is_drafting or stats.drafts.num_accepted_tokens > 20
    if is_caching:
        assert stats.prefix_cache_hits >= len(PROMPTS[-1]) // 16 * 16 > 100, "the longest was not found"


def check_replay(family: Family, _: pytest.LogCaptureFixture) -> None:
    """The engine core is lost when a request has ten more tokens, and another one gets what the journal sends."""
    folder, expected = family
    journal, logprobs, num_engines = Journal(448), [list[float]() for _ in PROMPTS], 0
    for number, prompt in enumerate(PROMPTS):
        journal.add(EngineCoreRequest(str(number), prompt, greedy()))
    token_ids: list[list[int]] = [[] for _ in PROMPTS]
    while journal.entries:
        num_engines, most = num_engines + 1, max(map(len, token_ids)) + REPLAY_AFTER
        with make_llm(folder) as llm:
            core = core_of(llm)
            for request in journal.take_unsent():
                core.add_request(request)
            while journal.entries and max(map(len, token_ids)) < most:
                outputs = core.step().outputs
                journal.note_outputs(outputs)
                for output in outputs:
                    token_ids[int(output.request_id)] += output.new_token_ids
                    logprobs[int(output.request_id)] += [entries[0][1] for entries in output.logprobs or ()]
        journal.engine_died(lambda _: True)
    assert num_engines == 1 + (NUM_TOKENS - 1) // REPLAY_AFTER
    assert token_ids == [one.token_ids for one in expected]
    for own, want in zip(logprobs, expected, strict=True):
        assert own == pytest.approx(want.logprobs, abs=1e-4)


CHECKS: dict[str, Callable[[Family, pytest.LogCaptureFixture], None]] = {
    "exact": check_exact,
    "tensor parallel": partial(check_ranks, tensor_parallel_size=2),
    "pipeline parallel": partial(check_ranks, pipeline_parallel_size=2),
    "int8": check_int8,
    "speculation": partial(check_twice, is_drafting=True, is_caching=False),
    "prefix caching": partial(check_twice, is_drafting=False, is_caching=True),
    "replay": check_replay,
    "two stages of two ranks": partial(check_ranks, tensor_parallel_size=2, pipeline_parallel_size=2),
    "speculation and prefix caching": partial(check_twice, is_drafting=True, is_caching=True),
}
"""By column of the table; the last two show two columns each."""
OF_FAMILIES = ("exact", "two stages of two ranks", "int8")
"""What a family's weights and layers decide."""
OF_KINDS = ("speculation and prefix caching", "replay")
"""What the engine does with all layers of a kind alike."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "check"), PAIRS if FULL else [*product(FAMILIES, OF_FAMILIES), *product(OF_EACH_KIND, OF_KINDS)]
)
def test_a_family(architecture: str, check: str, family: Family, caplog: pytest.LogCaptureFixture) -> None:
    CHECKS[check](family, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_small_steps_are_recorded(
    architecture: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of families whose checkpoint here has heads of sizes that the C++ kernels do not take, too."""
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    config = CheckpointConfig.from_folder(checkpoint(FAMILIES[architecture]))
    attentions = [one.attention for one in config.options.layers if isinstance(one.attention, AttentionOptions)]
    factor = max((16 // gcd(one.head_size or config.head_size, 16) for one in attentions), default=1)
    if factor == 1:
        return  # `check_exact` shows it
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(FAMILIES[architecture]), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    values = json.loads((folder / "config.json").read_text())
    text = values.get("text_config", values)
    text["head_dim"] = config.head_size * factor
    for layer in text.get("per_layer_config", {}).values():
        layer["head_dim"] *= factor
    if "mrope_section" in (rope := text.get("rope_parameters", {})):
        rope["mrope_section"] = [factor * number for number in rope["mrope_section"]]
    (folder / "config.json").write_text(json.dumps(values))
    are_recorded: list[bool] = []
    create = RecordedForward.__init__

    def note(forward: RecordedForward, *args: Any) -> None:
        create(forward, *args)
        are_recorded.append(forward.samples)

    monkeypatch.setattr(RecordedForward, "__init__", note)
    with make_llm(folder, load_format="dummy", tokenizer=str(checkpoint("tinypy"))):
        assert are_recorded
        assert all(are_recorded), "the log names what cannot be recorded"


def test_every_architecture_is_in_the_table() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()
    assert CHECKS.keys() == {*COLUMNS, *OF_FAMILIES, *OF_KINDS}


def kinds_of(options: ModelOptions) -> set[tuple[Any, ...]]:
    """What keys, values, states, positions and residual streams of a model's layers are like."""
    of_model = (
        options.altup is None, options.layer_inputs is None, options.shared_transformer is None, options.layer_scales,
        options.parallel_residual, options.residual_multiplier == 1, options.norms.after_attention is None,
        options.norms.after_mlp is None,
    )  # fmt: skip
    kinds: set[tuple[Any, ...]] = {("model", *of_model)}
    for layer in options.layers:
        attention, kind = layer.attention, [type(layer.attention), type(layer.state), type(layer.mlp)]
        if isinstance(attention, AttentionOptions):
            rope = attention.rope
            kind += [
                attention.window is None, attention.is_chunked, attention.cache_of is None, attention.keys_are_values,
                attention.sinks, rope is not None and bool(rope.mrope_section),
            ]  # fmt: skip
        kinds.add(tuple(kind))
    return kinds


def test_each_kind_of_layer_is_shown_by_default(checkpoint: Callable[[str], Path]) -> None:
    kinds = {
        architecture: kinds_of(CheckpointConfig.from_folder(checkpoint(name)).options)
        for architecture, name in FAMILIES.items()
    }
    shown = set[tuple[Any, ...]]().union(*(kinds[architecture] for architecture in OF_EACH_KIND))
    missing = {architecture: own - shown for architecture, own in kinds.items() if own - shown}
    assert not missing, "add such families to OF_EACH_KIND"


def test_the_page_claims_what_is_tested() -> None:
    page = PAGE.read_text()
    assert page == with_table(page, rendered(PAIRS)), "run tests/support/families.py"
