"""LLM: prompts in, outputs in their order, and what ends a request."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine import LLM, RequestOutputKind, SamplingParams
from quire_engine.errors import CheckpointError, RequestError
from quire_engine.frontend.beam_search import BeamSearch, BeamSearchParams
from quire_engine.messages import SchedulerOutput
from quire_engine.outputs import CompletionOutput, Logprob
from quire_engine.worker.submitted_step import SubmittedStep
from support.checkpoints import edit_json


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> LLM:
    return LLM(checkpoint("tinypy"), dtype="float32", max_model_len=256)


GREEDY = SamplingParams(temperature=0, max_tokens=20)


def test_every_kind_of_prompt(llm: LLM) -> None:
    ids = llm.generate("import os", GREEDY, use_tqdm=False)[0].prompt_token_ids
    prompts = ["import os", ids, {"prompt": "import os"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["import os", None, "import os", None]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate([], use_tqdm=False) == []


def test_unset_parameters_are_the_checkpoints_defaults(checkpoint: Callable[[str], Path]) -> None:
    override = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.2}
    llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=256, override_generation_config=override)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.2)
    said = [llm.generate("import os", given, use_tqdm=False)[0].outputs[0].token_ids for given in (params, None)]
    said.append([token for delta in llm.stream("import os") for token in delta.outputs[0].token_ids])
    assert said == [said[0]] * 3
    assert len(said[0]) == 5
    longer = llm.generate("import os", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert len(longer[0].outputs[0].token_ids) == 9, "given parameters are taken as they are"


def test_a_default_beyond_the_context_ends_with_it(checkpoint: Callable[[str], Path]) -> None:
    override = {"temperature": 0.0, "max_new_tokens": 4096}
    llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=32, override_generation_config=override)
    assert llm.generate("import os", use_tqdm=False)[0].finished


def test_one_set_of_parameters_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 30, 7)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 30, 7]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_float16_on_the_cpu_says_the_same(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    half = LLM(checkpoint("tinypy"), dtype="float16", device="cpu", max_model_len=256)
    texts = [engine.generate("def add(a, b):", GREEDY, use_tqdm=False)[0].outputs[0].text for engine in (llm, half)]
    assert texts[0] == texts[1] != ""


def test_stream_concatenates_to_the_whole(llm: LLM) -> None:
    whole = llm.generate("class A:\n", GREEDY, use_tqdm=False)[0].outputs[0]
    deltas = list(llm.stream("class A:\n", GREEDY))
    assert len(deltas) > 1
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == whole.token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("def f():\n", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.get_stats().num_running == 1
    stream.close()  # type: ignore[attr-defined]
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_blocks_used) == (0, 0)


def test_stop_conditions(llm: LLM) -> None:
    free = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    tokens, text = free[0].outputs[0].token_ids, free[0].outputs[0].text
    stop_id = tokens[5]
    first = tokens.index(stop_id)

    by_token = llm.generate(
        "import os\n", SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop_id]), use_tqdm=False
    )[0].outputs[0]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", stop_id)
    assert by_token.token_ids == tokens[: first + 1]

    stop = text[10:13]
    by_string = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=30, stop=[stop]), use_tqdm=False)[
        0
    ].outputs[0]
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", stop)
    assert by_string.text == text[: text.index(stop)]
    assert llm.get_stats().num_blocks_used == 0

    late = llm.generate(
        "import os\n",
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop_id], min_tokens=first + 3),
        use_tqdm=False,
    )[0].outputs[0]
    assert len(late.token_ids) > first + 3


def test_the_context_ends_a_request(llm: LLM) -> None:
    output = llm.generate([[5] * 250], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


def test_a_bad_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be in"):
        llm.generate(["fine", [99999]], GREEDY, use_tqdm=False)
    assert llm.get_stats().num_waiting == 0
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt_token_ids is empty"),
        ([-1], "token id -1"),
        ([4096], "token id 4096"),
        ([1.5], "list of integers"),
        ({"text": "a"}, "must have prompt or prompt_token_ids"),
        ("x " * 300, "max_model_len=256"),
        ("x" * 10_000_000, "cannot fit"),
    ],
)
def test_bad_prompts_are_named(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]


def test_chat_uses_the_checkpoints_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "def f(x):"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    many = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert one[0].outputs[0].text == many[1].outputs[0].text


def test_a_failing_step_ends_only_the_request_that_fails(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [f"def f{i}(x):" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    worker = llm._core.executor._worker
    submit = worker.submit_model
    poison = llm.generate(prompts[2], params, use_tqdm=False)[0].prompt_token_ids
    faulty_ids: set[str] = set()

    def fails(scheduler_output: SchedulerOutput) -> SubmittedStep:
        faulty_ids.update(r.request_id for r in scheduler_output.new_requests if r.token_ids[: len(poison)] == poison)
        if faulty_ids & set(scheduler_output.num_scheduled_tokens):
            raise RuntimeError("a kernel failed")
        return submit(scheduler_output)

    monkeypatch.setattr(worker, "submit_model", fails)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2 + ["error"] + ["length"] * 3
    assert outputs[2].error is not None
    assert "its log has the cause" in outputs[2].error
    assert "RuntimeError: a kernel failed" in caplog.text
    monkeypatch.undo()
    assert [o.outputs[0].text for i, o in enumerate(outputs) if i != 2] == expected[:2] + expected[3:]
    assert llm.get_stats().num_blocks_used == 0


def test_sharded_checkpoints_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from quire_engine.frontend.tokenizer import load_tokenizer
    from support.oracle import make_checkpoint

    folder = make_checkpoint(tmp_path, "tied-gqa", load_tokenizer(checkpoint("tinypy")), max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole = LLM(checkpoint("tied-gqa"), dtype="float32").generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert LLM(folder, dtype="float32").generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs == whole[0].outputs


def test_bfloat16_runs(checkpoint: Callable[[str], Path]) -> None:
    output = LLM(checkpoint("tinypy"), dtype="bfloat16").generate("import os", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids


def test_missing_folder() -> None:
    with pytest.raises(CheckpointError, match="/nowhere"):
        LLM("/nowhere")


def test_a_script_that_imported_triton_ends_without_a_word(checkpoint: Callable[[str], Path]) -> None:
    """Triton's bindings report what is not collected before the interpreter ends."""
    script = f"import triton\nfrom quire_engine import LLM\nllm = LLM({str(checkpoint('tinypy'))!r}, max_model_len=64)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "leaked" not in result.stderr


def test_one_generation_at_a_time(llm: LLM) -> None:
    stream = llm.stream("a", GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="under way"):
        llm.generate("b", GREEDY, use_tqdm=False)
    assert len(list(stream)) == 19, "the first goes on undisturbed"
    assert llm.generate("b", GREEDY, use_tqdm=False)[0].finished


def test_a_tiny_temperature_is_as_good_as_greedy(llm: LLM) -> None:
    greedy = llm.generate("class A:\n", GREEDY, use_tqdm=False)[0].outputs[0].text
    cold = SamplingParams(temperature=1e-40, seed=1, max_tokens=20)
    assert llm.generate("class A:\n", cold, use_tqdm=False)[0].outputs[0].text == greedy


def test_min_tokens_leaves_an_ignored_eos_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    free = llm.generate("x = 1\n", params, use_tqdm=False)[0].outputs[0].token_ids
    held = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, min_tokens=40)
    assert llm.generate("x = 1\n", held, use_tqdm=False)[0].outputs[0].token_ids == free


def test_bad_words_of_several_tokens_do_not_come(llm: LLM) -> None:
    free = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    output = free[0].outputs[0]
    phrase = output.token_ids[8:11]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words_token_ids=[phrase])
    kept = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0].token_ids
    last = next(i for i in range(30) if output.token_ids[i : i + 3] == phrase) + 2
    assert kept[:last] == output.token_ids[:last]
    assert kept[last] != output.token_ids[last]
    assert not any(kept[i : i + 3] == phrase for i in range(len(kept)))
    word = output.text.split()[2]
    words = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[word])
    assert word not in llm.generate("import os\n", words, use_tqdm=False)[0].outputs[0].text.split()


def test_without_detokenizing_there_are_only_token_ids(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, prompt_logprobs=1)
    with_text = llm.generate("import os\n", params, use_tqdm=False)[0]
    without = llm.generate("import os\n", msgspec.structs.replace(params, detokenize=False), use_tqdm=False)[0]
    assert with_text.outputs[0].text
    assert without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert without.outputs[0].finish_reason == with_text.outputs[0].finish_reason
    for entries in (without.outputs[0].logprobs, without.prompt_logprobs):
        assert entries is not None
        assert {one.decoded_token for entry in entries if entry for one in entry.values()} == {None}


def test_a_stop_string_over_several_tokens_keeps_the_tokens_and_cuts_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    free = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0]
    decode = llm._inputs.tokenizer.decode
    stop = decode(free.token_ids[:12])[-6:]
    end = free.text.index(stop) + len(stop)
    num_tokens = next(n for n in range(31) if len(decode(free.token_ids[:n])) >= end)
    for include in (False, True):
        stopping = msgspec.structs.replace(params, stop=[stop], include_stop_str_in_output=include)
        output = llm.generate("import os\n", stopping, use_tqdm=False)[0].outputs[0]
        assert output.text == free.text[: end if include else end - len(stop)]
        assert output.token_ids == free.token_ids[:num_tokens]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        deltas = list(llm.stream("import os\n", stopping))
        assert "".join(delta.outputs[0].text for delta in deltas) == output.text


def test_an_end_of_sequence_token_that_is_not_the_tokenizers_own_is_named(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    token_ids = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0].token_ids
    other = token_ids[4]
    monkeypatch.setattr(llm._core.ready, "eos_token_ids", [1, other])
    output = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", other)
    primary = llm._inputs.tokenizer.eos_token_id
    try:
        llm._inputs.tokenizer.eos_token_id = other
        output = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0]
    finally:
        llm._inputs.tokenizer.eos_token_id = primary
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == token_ids[: token_ids.index(other) + 1]


def test_the_tokenizers_end_of_sequence_token_ends_too(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Where `config.json` names another one, as those of fine-tuned chat models do."""
    folder = shutil.copytree(checkpoint("tinypy"), tmp_path / "model")
    edit_json(folder / "config.json", eos_token_id=2)
    (folder / "generation_config.json").unlink(missing_ok=True)
    llm = LLM(folder, dtype="float32", max_model_len=64)

    def generate(**options: Any) -> CompletionOutput:
        params = SamplingParams.from_mapping({"temperature": 0, "max_tokens": 6, "logit_bias": {1: 100.0}, **options})
        return llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0]

    try:
        assert llm._core.ready.eos_token_ids == [2]  # type: ignore[attr-defined]
        ended = generate()
        assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([1], "", "stop", None)
        assert len(generate(min_tokens=3).token_ids) == 4
        assert generate(ignore_eos=True).token_ids == [1] * 6
        matched = generate(structured_outputs={"regex": "[ab]{2,40}"})
        assert (len(matched.text), matched.token_ids[-1], matched.finish_reason) == (2, 1, "stop")
        with pytest.raises(RequestError, match="allowed_token_ids holds no token"):
            generate(min_tokens=1, allowed_token_ids=[1])
        search = BeamSearch(llm._inputs.process([5, 6]), BeamSearchParams(beam_width=2, max_tokens=4), llm._core.ready)
        search.advance([{token_id: Logprob(-float(token_id), 1, None) for token_id in range(1, 9)}])
        assert [one.tokens[-1] for one in search.finished] == [1, 2]
    finally:
        llm.shutdown()


def test_output_kind_makes_no_difference_offline(llm: LLM) -> None:
    outputs = [
        llm.generate("class A:\n", SamplingParams(temperature=0, max_tokens=9, output_kind=kind), use_tqdm=False)[0]
        for kind in RequestOutputKind
    ]
    assert all(output.finished and output.outputs == outputs[0].outputs for output in outputs)


def test_parameters_that_leave_no_token_are_refused(llm: LLM) -> None:
    for params in (
        SamplingParams(allowed_token_ids=[1], min_tokens=4),
        SamplingParams(allowed_token_ids=[1, 7], stop_token_ids=[7], min_tokens=1),
    ):
        with pytest.raises(RequestError, match="allowed_token_ids holds no token"):
            llm.generate("a", params, use_tqdm=False)
    assert llm.generate("a", SamplingParams(allowed_token_ids=[1, 7], min_tokens=1), use_tqdm=False)[0].finished


def test_each_entry_of_many_is_generated_or_refused_by_itself(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few may be live at a time."""
    monkeypatch.setattr("quire_engine.llm.MAX_LIVE_REQUESTS", 2)
    said = [{"role": "user", "content": "a"}]
    good: list[Any] = ["def f(", {"prompt_token_ids": [5, 6]}, {"messages": said}, "import "]
    entries: list[tuple[Any, SamplingParams]] = [(prompt, GREEDY) for prompt in good]
    entries.insert(0, ("", GREEDY))
    entries.insert(3, ({"prompt_token_ids": [-1]}, GREEDY))
    entries.append(({"messages": []}, GREEDY))
    outcomes = dict(llm.generate_each(iter(entries)))
    refused = {number for number, outcome in outcomes.items() if isinstance(outcome, RequestError)}
    assert refused == {0, 3, 6}
    assert set(outcomes) == set(range(7))
    expected = [*llm.generate(good[:2], GREEDY, use_tqdm=False), *llm.chat(said, GREEDY, use_tqdm=False),
                *llm.generate(good[3:], GREEDY, use_tqdm=False)]  # fmt: skip
    for number, output in zip((1, 2, 4, 5), expected, strict=True):
        outcome = outcomes[number]
        assert not isinstance(outcome, RequestError)
        assert outcome.finished
        assert outcome.outputs[0].token_ids == output.outputs[0].token_ids
    assert list(llm.generate_each([])) == []
