"""FaultInjection: strikes when it is due, and at no other time."""

from pathlib import Path

import pytest
from quire_engine.messages import ModelRunnerOutput, NewRequestData
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.fault_injection import FaultInjection
from support.faults import put_fault


@pytest.fixture
def batch() -> InputBatch:
    """One request, with two tokens of output."""
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, vocab_size=32)
    batch.add(NewRequestData("a", [5, 6, 7], 1, SamplingParams(), [], [0], 0))
    return batch


@pytest.mark.parametrize("fault", [{"token_id": 7}, {"num_output_tokens": 2}], ids=str)
def test_strikes_when_it_is_due(fault: dict[str, int], batch: InputBatch, tmp_path: Path) -> None:
    file = tmp_path / "fault.json"
    put_fault(file, action="raise", once=True, **fault)
    FaultInjection(file).strike(ModelRunnerOutput({}), batch)
    with pytest.raises(RuntimeError, match="an injected fault"):
        FaultInjection(file).strike(ModelRunnerOutput({"a": [7]}), batch)
    FaultInjection(file).strike(ModelRunnerOutput({"a": [7]}), batch)


@pytest.mark.parametrize("fault", [{"token_id": 8}, {"num_output_tokens": 3}], ids=str)
def test_no_other_token_is_hit_whether_its_request_is_still_there_or_not(
    fault: dict[str, int], batch: InputBatch, tmp_path: Path
) -> None:
    """With steps in flight, a result may come after its request has gone."""
    file = tmp_path / "fault.json"
    put_fault(file, action="raise", **fault)
    FaultInjection(file).strike(ModelRunnerOutput({"a": [7]}), batch)
    batch.remove("a")
    FaultInjection(file).strike(ModelRunnerOutput({"a": [7]}), batch)
