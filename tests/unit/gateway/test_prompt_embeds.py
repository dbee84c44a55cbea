"""`prompt_embeds` of a body: files of torch.save and safetensors are read, nothing is run, all else is an error."""

import base64
import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine.frontend.tensor_files import _torch_tensor, _UnknownFormatError, read_tensor
from quire_gateway.errors import InvalidRequestError
from quire_gateway.prompt_embeds import read_prompt_embeds
from safetensors.torch import save as save_safetensors
from support.gateway import ask

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def saved(tensor: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def read(data: bytes) -> np.ndarray:
    (rows,) = read_prompt_embeds(base64.b64encode(data).decode(), 1)
    assert rows.dtype == np.float32
    return rows


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as writer:
        for name, content in entries.items():
            # Of 1980: with the time of day the tests' names would differ between the processes that collect them.
            writer.writestr(zipfile.ZipInfo(name), content, compression)
    return file.getvalue()


def entries_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as reader:
        return {name: reader.read(name) for name in reader.namelist()}


def changed(**contents: bytes) -> bytes:
    """What torch.save writes, with other entries."""
    entries = entries_of(saved(ROWS))
    names = {name.rpartition("/")[2].replace(".", "_"): name for name in entries}
    return archive(entries | {names[name]: content for name, content in contents.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [saved, lambda tensor: save_safetensors({"x": tensor})])
def test_tensors_are_read(dtype: torch.dtype, write: Callable[[torch.Tensor], bytes]) -> None:
    rows = ROWS.to(dtype)
    assert (read(write(rows)) == rows.float().numpy()).all()
    assert (read(write(rows[None])) == rows.float().numpy()).all()


def test_a_part_of_a_storage_is_read() -> None:
    assert (read(saved(ROWS[1:3])) == ROWS[1:3].numpy()).all()
    assert (read(saved(ROWS[2:3])) == ROWS[2:3].numpy()).all()
    assert (read(saved(ROWS.clone().requires_grad_())) == ROWS.numpy()).all()
    large = torch.randn(300, 300)
    assert (read(saved(large)) == large.numpy()).all()


@pytest.mark.parametrize("write", [saved, lambda tensor: save_safetensors({"x": tensor})])
def test_integers_are_read_where_they_are_taken(write: Callable[[torch.Tensor], bytes]) -> None:
    found = read_tensor(base64.b64encode(write(torch.tensor([[1, 4, -6]]))).decode())
    assert (found.dtype, found.tolist()) == (np.int64, [[1, 4, -6]])


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither a file of torch.save nor of safetensors"),
        (b"x" * 100, "neither a file of torch.save nor of safetensors"),
        (b"\xff" * 8, "neither"),
        (b"PK\3\4", "archive cannot be read"),
        (saved(ROWS)[:-30], "archive cannot be read"),
        (saved(Evil()), "something else than one plain tensor"),
        (saved([ROWS]), "opcode EMPTY_LIST"),
        (saved({"x": ROWS}), "opcode EMPTY_DICT"),
        (saved(torch.nn.Parameter(ROWS)), "something else"),
        (saved(7), "something else"),
        (saved(ROWS.t()), "not contiguous"),
        (saved(ROWS[:1].expand(10**9, 8)), "not contiguous"),
        (saved(ROWS.int()), "'torch IntStorage'; it must be of floats"),
        (saved(ROWS.long()), "the tensor is of int64; it must be of floats"),
        (saved(torch.zeros(8)), r"has shape \[8\]"),
        (saved(torch.zeros(0, 8)), r"has shape \[0, 8\]"),
        (saved(torch.zeros(2, 2, 2)), r"has shape \[2, 2, 2\]"),
        (saved(torch.zeros(())), r"has shape \[\]"),
        (saved(ROWS.to_sparse()), "prompt_embeds"),
        (changed(data_pkl=b""), "archive cannot be read"),
        (changed(data_pkl=pickle.dumps(Evil())), "opcode|something else"),
        (changed(data_pkl=b"\x80\x02."), "archive cannot be read"),
        (changed(data_pkl=b"." * (1 << 20)), "larger than"),
        (changed(byteorder=b"big"), "little-endian"),
        (changed(**{"0": b"short"}), "fewer values"),
        (archive({"a/data.pkl": b"", "b/data.pkl": b""}), "no single data.pkl"),
        (archive({"x": b""}), "no single data.pkl"),
        (archive({f"{i}": b"" for i in range(65)}), "more than 64 entries"),
        (archive(entries_of(saved(torch.zeros(1000, 1000))), zipfile.ZIP_DEFLATED), "compressed"),
        (save_safetensors({"x": ROWS, "y": ROWS + 1}), "holds 2 tensors"),
        (save_safetensors({}), "holds 0 tensors"),
        (save_safetensors({"x": ROWS.int()}), "dtype 'I32'"),
        (save_safetensors({"x": ROWS})[:-1], "bytes that are not there"),
        (struct.pack("<Q", 7) + b'{"x":1}', "header cannot be read"),
        (struct.pack("<Q", 2000) + b"[" * 2000, "header cannot be read"),
    ],
)
def test_all_else_is_an_error_that_names_the_field(
    data: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        read(data)
    assert raised.value.param == "prompt_embeds"
    assert str(raised.value).startswith("prompt_embeds")
    assert capsys.readouterr().out == "", "nothing was run"


def test_sizes_that_are_lies_take_no_memory() -> None:
    header = b'{"x":{"dtype":"F32","shape":[1000000000000,8],"data_offsets":[0,32]}}'
    for data in (struct.pack("<Q", len(header)) + header + bytes(32), changed(**{"0": b""})):
        with pytest.raises(InvalidRequestError, match="fewer values"):
            read(data)


@pytest.mark.parametrize("value", [5, True, {}, [], [5], ["x", None], "é", "%%%", "abc", "\ud800"])
def test_what_is_no_base64_is_an_error(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_embeds"):
        read_prompt_embeds(value, 8)


def test_random_damage_is_an_error_or_a_tensor() -> None:
    params: set[str | None] = set()
    chance, files = Random(2), [saved(ROWS), save_safetensors({"x": ROWS})]
    for _ in range(1500):
        data = bytearray(chance.choice(files))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read(bytes(data))
        except InvalidRequestError as error:
            params.add(error.param)
    assert params == {"prompt_embeds"}


def test_any_opcode_in_any_place_is_an_error_or_a_tensor() -> None:
    entries = entries_of(saved(ROWS))
    name = next(name for name in entries if name.endswith("data.pkl"))
    places = [position for _, _, position in pickletools.genops(entries[name]) if position is not None]
    for opcode in pickletools.opcodes:
        for place in places:
            data = entries[name][:place] + opcode.code.encode("latin-1") + entries[name][place:]
            try:
                _torch_tensor(archive(entries | {name: data}))
            except _UnknownFormatError:
                continue


# -- in a request -----------------------------------------------------------------------------------------------------


def sent(body: dict[str, Any]) -> Any:
    """Name, shape and values of what each prompt becomes."""
    answer, requests = ask("/v1/completions", {"model": "m", **body})
    assert answer.status == 200, answer.json
    prompts = {"text_input", "input_ids", "prompt_embeds"}
    return [
        (item.name, list(item.shape), content)
        for request in requests
        for item, content in zip(request.inputs, request.raw_input_contents, strict=True)
        if item.name in prompts
    ]


def test_rows_go_to_the_model_as_an_input() -> None:
    text = base64.b64encode(saved(ROWS)).decode()
    expected = ("prompt_embeds", [5, 8], ROWS.numpy().tobytes())
    assert sent({"prompt_embeds": text}) == [expected]
    assert sent({"prompt": None, "prompt_embeds": text}) == [expected]
    assert sent({"prompt": "", "prompt_embeds": [text]}) == [expected]
    assert sorted(name for name, *_ in sent({"prompt": "Hi", "prompt_embeds": [text, text]})) == [
        "prompt_embeds", "prompt_embeds", "text_input",
    ]  # fmt: skip


def test_errors_name_the_field() -> None:
    text = base64.b64encode(saved(ROWS)).decode()
    for body, param in (
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_embeds": text, "echo": True}, "echo"),
        ({}, "prompt"),
    ):
        answer, _ = ask("/v1/completions", {"model": "m", **body})
        assert answer.status == 400
        assert answer.json["error"]["param"] == param
