"""One rank over torch.distributed, as a process: it reads a line of JSON, its job, and prints what it saw."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from quire_engine.config import EngineConfig
from quire_engine.distributed import Communicator, ParallelState
from quire_engine.distributed.torch_distributed import initialize_parallel_state, shutdown_parallel_state
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker import Worker


def listening_addresses() -> list[str]:
    """Hexadecimal addresses that sockets of this process listen on, over TCP."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def talk(group: Communicator) -> dict[str, Any]:
    """Every operation of a group, with numbers that tell the ranks apart."""
    sums = [
        group.all_reduce(torch.full((3, 5), 0.1 + group.rank, dtype=dtype)).double().sum().item()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    gathered = group.gather(torch.arange(4.0).view(2, 2) + 10 * group.rank)
    received = []
    if group.rank == 0:
        for number in range(3):
            group.send(torch.full((2, number + 1), float(number)), 1)
    elif group.rank == 1:
        received = [group.receive((2, number + 1), torch.float32, 0).flatten().tolist() for number in range(3)]
    return {
        "size": group.size,
        "rank": group.rank,
        "sums": sums,
        "gathered": None if gathered is None else gathered.tolist(),
        "received": received,
    }


def sample_first_tokens(job: dict[str, Any], state: ParallelState) -> list[int]:
    """The token that follows each prompt, on the output rank; nothing on the others."""
    config = EngineConfig.from_settings(
        {
            "model": job["folder"],
            "dtype": "float32",
            "tensor_parallel_size": state.tensor_parallel_size,
            "pipeline_parallel_size": state.pipeline_parallel_size,
        }
    )
    worker = Worker(config, CheckpointConfig.from_folder(Path(job["folder"])), 128, state)
    worker.initialize_cache(8 * len(job["prompts"]))
    requests = [
        NewRequestData(f"r{i}", prompt, len(prompt), SamplingParams(temperature=0), [], [*range(8 * i, 8 * i + 8)], 0)
        for i, prompt in enumerate(job["prompts"])
    ]
    scheduled = {request.request_id: len(request.token_ids) for request in requests}
    output = worker.execute_model(SchedulerOutput(scheduled, requests))
    return [token_id for token_ids in output.sampled_token_ids.values() for token_id in token_ids]


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    state = initialize_parallel_state(
        rank=job["rank"],
        tensor_parallel_size=job["tensor"],
        pipeline_parallel_size=job["pipeline"],
        init_method=job["init_method"],
        timeout_seconds=60,
    )
    report = {
        "tensor_group": talk(state.tensor_group) if state.tensor_group else None,
        "pipeline_group": talk(state.pipeline_group) if state.pipeline_group else None,
        "token_ids": sample_first_tokens(job, state),
        "listens": listening_addresses(),
    }
    torch.distributed.barrier()  # what a rank has sent is on its way until it is received
    shutdown_parallel_state()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
