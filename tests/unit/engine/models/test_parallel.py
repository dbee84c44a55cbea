"""Who holds what, and that the ranks together have everything and read it once."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, loader
from quire_engine.models.checkpoints import safetensors
from quire_engine.models.layers.parallel import (
    ColumnParallel,
    Packable,
    QKVParallel,
    RowParallel,
    VocabParallel,
    shard,
    stage_layers,
)
from quire_engine.models.linear import LinearMethod
from quire_engine.models.linear.int8 import QuantizedWhenLoaded
from safetensors import safe_open
from support.ranks import run_on_ranks, thread_ranks


def places(tensor: int, pipeline: int = 1) -> list[ParallelState]:
    return [
        ParallelState(rank=rank, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        for rank in range(tensor * pipeline)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_slices_follow_each_other_and_cover_everything(ranks: int) -> None:
    for size in (*range(1, 40), 515, 32000):
        slices = [shard(size, place) for place in places(ranks)]
        held = {(part.start, part.stop) for part in slices}
        assert sorted(index for start, stop in held for index in range(start, stop)) == [*range(size)]
        lengths = [part.stop - part.start for part in slices]
        assert max(lengths) == math.ceil(size / ranks)
        if size % ranks == 0:
            assert set(lengths) == {size // ranks}


def test_heads_stay_whole_and_kv_heads_have_several_holders() -> None:
    def heads(number: int, ranks: int) -> list[tuple[int, int]]:
        parts = [shard(number * 16, place, unit=16) for place in places(ranks)]
        return [(part.start // 16, part.stop // 16) for part in parts]

    assert heads(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert heads(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert heads(1, 3) == [(0, 1)] * 3


@pytest.mark.parametrize("num_heads", [4, 8, 12])
def test_query_heads_are_where_their_kv_head_is(num_heads: int) -> None:
    for ranks in range(1, num_heads + 1):
        for num_kv_heads in range(1, num_heads + 1):
            if num_heads % ranks or num_heads % num_kv_heads or (num_kv_heads % ranks and ranks % num_kv_heads):
                continue
            for place in places(ranks):
                queries, keys = shard(num_heads, place), shard(num_kv_heads, place)
                group = num_heads // num_kv_heads
                wanted = [head // group for head in range(queries.start, queries.stop)]
                local_group = (queries.stop - queries.start) // (keys.stop - keys.start)
                assert wanted == [keys.start + i // local_group for i in range(len(wanted))]


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"), [(2, 1, [2]), (4, 2, [2, 2]), (5, 3, [2, 2, 1]), (4, 3, [2, 1, 1])]
)
def test_layers_left_over_go_to_the_first_stages(num_layers: int, stages: int, expected: list[int]) -> None:
    layers = [stage_layers(num_layers, place) for place in places(1, stages)]
    assert [len(numbers) for numbers in layers] == expected
    assert [number for numbers in layers for number in numbers] == [*range(num_layers)]


@pytest.mark.parametrize(
    ("num_layers", "stages", "joined", "expected"), [(6, 2, 3, [3, 3]), (6, 2, 5, [1, 5]), (9, 3, 4, [3, 2, 4])]
)
def test_the_last_stage_has_the_layers_that_share_a_cache(
    num_layers: int, stages: int, joined: int, expected: list[int]
) -> None:
    layers = [stage_layers(num_layers, place, joined) for place in places(1, stages)]
    assert [len(numbers) for numbers in layers] == expected
    assert [number for numbers in layers for number in numbers] == [*range(num_layers)]


# -- layers ------------------------------------------------------------------------------------------------------------


def load(layers: list[Packable], whole: dict[str, torch.Tensor], method: LinearMethod | None = None) -> None:
    for layer in layers:
        layer.create(method)
    targets = {name: target for layer in layers for name, target in layer.load_targets().items()}
    assert targets.keys() == whole.keys()
    for name, target in targets.items():
        assert target.shape == tuple(whole[name].shape)
        target.parameter.copy_(whole[name][target.index])
    for layer in layers:
        layer.pack()


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_a_column_and_a_row_parallel_layer_are_the_plain_ones(ranks: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = {"gate.weight": torch.randn(12, 5), "up.weight": torch.randn(12, 5), "down.weight": torch.randn(7, 12)}
    if bias:
        whole |= {"gate.bias": torch.randn(12), "up.bias": torch.randn(12), "down.bias": torch.randn(7)}
    x = torch.randn(9, 5)
    gate, up = (F.linear(x, whole[f"{name}.weight"], whole.get(f"{name}.bias")) for name in ("gate", "up"))
    expected = F.linear(gate * up, whole["down.weight"], whole.get("down.bias"))

    def compute(rank: ParallelState) -> torch.Tensor:
        columns = ColumnParallel(5, {"gate": 12, "up": 12}, bias, rank)
        row = RowParallel(12, "down", 7, bias, rank)
        load([columns, row], whole)
        gate, up = columns(x).chunk(2, dim=-1)
        result: torch.Tensor = row(gate * up)
        return result

    results = run_on_ranks(thread_ranks(ranks, 1), compute)
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(result, results[0]), "other bits than on the first rank"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_the_queries_keys_and_values_of_its_heads(ranks: int) -> None:
    whole = {
        "q_proj.weight": torch.randn(32, 5),
        "k_proj.weight": torch.randn(16, 5),
        "v_proj.weight": torch.randn(16, 5),
    }
    x = torch.randn(3, 5)
    query, key, value = (F.linear(x, weight).unflatten(-1, (-1, 8)) for weight in whole.values())
    for place in places(ranks):
        layer = QKVParallel(5, 4, 2, 8, False, place)
        load([layer], whole)
        got = [part.unflatten(-1, (-1, 8)) for part in layer(x).split(layer.sizes, dim=-1)]
        assert [part.shape[1] for part in got] == [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        heads, kv_heads = shard(4, place), shard(2, place)
        for part, expected in zip(got, (query[:, heads], key[:, kv_heads], value[:, kv_heads]), strict=True):
            torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("vocab_size", [12, 13, 515, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_vocabulary_cut_unevenly_is_whole_again(vocab_size: int, ranks: int) -> None:
    weight = torch.randn(vocab_size, 6)
    token_ids, hidden = torch.arange(vocab_size), torch.randn(3, 6)

    def compute(rank: ParallelState) -> tuple[torch.Tensor, torch.Tensor | None]:
        vocabulary = VocabParallel(vocab_size, 6, rank, is_head=True)
        load([vocabulary], {"weight": weight})
        return vocabulary.embed(token_ids), vocabulary.logits(hidden)

    results = run_on_ranks(thread_ranks(ranks, 1), compute)
    assert all(torch.equal(embedded, weight) for embedded, _ in results)
    torch.testing.assert_close(results[0][1], F.linear(hidden, weight))
    assert results[0][1].is_contiguous()
    assert [logits for _, logits in results[1:]] == [None] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slice_of_a_vocabulary_in_int8_is_a_part_of_the_whole(ranks: int) -> None:
    weight, token_ids, hidden = torch.randn(75, 8), torch.arange(75), torch.randn(3, 8)

    def compute(rank: ParallelState) -> tuple[torch.Tensor, torch.Tensor | None]:
        vocabulary = VocabParallel(75, 8, rank, is_head=True)
        load([vocabulary], {"weight": weight}, QuantizedWhenLoaded(torch.int8))
        return vocabulary.embed(token_ids), vocabulary.logits(hidden)

    ((embedded, logits),) = run_on_ranks(thread_ranks(1, 1), compute)
    assert not torch.equal(embedded, weight), "it is quantised"
    results = run_on_ranks(thread_ranks(ranks, 1), compute)
    assert all(torch.equal(each, embedded) for each, _ in results)
    assert torch.equal(results[0][1], logits)


# -- loading -----------------------------------------------------------------------------------------------------------


class CountedSlice:
    """A tensor of a file that adds up what is read of it."""

    def __init__(self, tensor: Any, name: str, ledger: dict[str, int]) -> None:
        self.tensor, self.name, self.ledger = tensor, name, ledger

    def get_shape(self) -> list[int]:
        shape: list[int] = self.tensor.get_shape()
        return shape

    def get_dtype(self) -> str:
        name: str = self.tensor.get_dtype()
        return name

    def __getitem__(self, index: Any) -> torch.Tensor:
        piece: torch.Tensor = self.tensor[index]
        self.ledger[self.name] = self.ledger.get(self.name, 0) + piece.nbytes
        return piece


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes read of each tensor; the loader can read in no other way."""
    read: dict[str, int] = {}

    class CountedFile:
        def __init__(self, path: Path, framework: str) -> None:
            self.file = safe_open(path, framework=framework)

        def __enter__(self) -> "CountedFile":
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Iterator[str]:
            return iter(self.file.keys())

        def get_slice(self, name: str) -> CountedSlice:
            return CountedSlice(self.file.get_slice(name), name, read)

    monkeypatch.setattr(safetensors, "safe_open", CountedFile)
    return read


def sizes_of(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("untied-mha", 1, 1),
        ("untied-mha", 4, 1),
        ("tied-gqa", 4, 1),
        ("biased-mqa", 2, 1),
        ("odd-sizes", 1, 3),
        ("tied-gqa", 1, 2),
        ("biased-mqa", 2, 2),
    ],
)
def test_ranks_read_the_checkpoint_once_but_for_what_is_replicated(
    name: str, tensor: int, pipeline: int, checkpoint: Callable[[str], Path], ledger: dict[str, int]
) -> None:
    folder = checkpoint(name)
    config = CheckpointConfig.from_folder(folder)
    total: dict[str, int] = {}
    by_rank = []
    for place in places(tensor, pipeline):
        ledger.clear()
        loader.load_model(folder, config, torch.float32, 64, place)
        by_rank.append(sum(ledger.values()))
        for tensor_name, size in ledger.items():
            total[tensor_name] = total.get(tensor_name, 0) + size

    def holders(tensor_name: str) -> int:
        if "norm" in tensor_name:
            return tensor
        if "k_proj" in tensor_name or "v_proj" in tensor_name:
            return max(1, tensor // config.num_kv_heads)
        if "embed_tokens" in tensor_name and config.tie_word_embeddings and pipeline > 1:
            return 2  # the embedding on the first stage, the head on the last
        return 1

    sizes = sizes_of(folder)
    assert total == {tensor_name: size * holders(tensor_name) for tensor_name, size in sizes.items()}
    replicated = sum(total.values()) - sum(sizes.values())
    print(f"{name}: {sum(sizes.values())} bytes, TP={tensor} PP={pipeline}; by rank {by_rank}, replicated {replicated}")


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_what_a_file_lacks_or_has_too_much_is_named_on_every_layout(
    tensor: int, pipeline: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    config = CheckpointConfig.from_folder(checkpoint("untied-mha"))
    tensors = load_file(checkpoint("untied-mha") / "model.safetensors")
    last = places(tensor, pipeline)[-1]
    file = tmp_path / "model.safetensors"

    def load(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, file)
        loader.load_model(tmp_path, config, torch.float32, 64, last)

    load(tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.x has no place in this architecture"):
        load(tensors | {"model.layers.7.x": torch.zeros(1)})
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has shape \(64, 48\); .* asks for \(64, 96\)"):
        load(tensors | {name: torch.zeros(64, 48)})
    with pytest.raises(CheckpointError, match=r"hold no layers\.1\.mlp\.down_proj\.weight"):
        load({key: value for key, value in tensors.items() if key != name})


# -- sizes that cannot be divided --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "message"),
    [
        ("tied-gqa", 3, 1, "tensor_parallel_size is 3; num_attention_heads=4 is no multiple of it; for this model it "
         "must be 1 or 2 or 4"),
        ("odd-sizes", 2, 1, "tensor_parallel_size is 2; intermediate_size=101 is no multiple of it; for this model it "
         "must be 1"),
        ("tied-gqa", 8, 1, "num_attention_heads=4 is no multiple of it; for this model it must be 1 or 2 or 4"),
        ("tied-gqa", 1, 3, "pipeline_parallel_size is 3; it must be at most num_hidden_layers=2"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_divided_are_refused(
    name: str, tensor: int, pipeline: int, message: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig.from_folder(checkpoint(name)).check_parallel(tensor, pipeline)


def test_engine_refuses_them_before_it_starts_a_worker(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire_engine import LLM
    from quire_engine.core import build_engine

    monkeypatch.setattr(build_engine, "make_executor", None)
    with pytest.raises(ValueError, match="tensor_parallel_size is 3"):
        LLM(checkpoint("tied-gqa"), tensor_parallel_size=3)
