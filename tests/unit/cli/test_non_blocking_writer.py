"""Nobody waits for a reader who does not read, and he is told what he has missed."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from quire_cli.console import NonBlockingWriter

# A server's log of 16 MB, which nobody reads on: it is taken in to its end all the same, and so are the other words.
SERVE = """
import io, sys
from quire_cli.console import Console
from quire_cli.server.server_log import ServerLog
with Console() as console:
    log = ServerLog(io.BytesIO((b"x" * 79 + b"\\n") * 200_000), console,
                    everything=True)
    log._thread.join()
    for _ in range(2000):
        console.announce("ready " + 60 * "x")
    print("not waited", file=open(sys.argv[1], "w"), flush=True)
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """Its end to read from, and a stream to its other end."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        yield read, stream
    os.close(read)


def read_all(descriptor: int, last: str) -> list[str]:
    """Lines up to the last one."""
    text = ""
    while f"{last}\n" not in text:
        text += os.read(descriptor, 1 << 20).decode()
    return text.splitlines()


def test_what_finds_no_room_is_dropped_and_counted_where_it_was(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, stream = pipe
    writer = NonBlockingWriter(stream, most_bytes=100_000)
    for number in range(5000):
        writer.write(f"{number:04} {'x' * 94}\n")  # 500 kB in all, of which the pipe takes 64 KiB
    assert not writer.flush(within_s=0)
    first, second = os.read(read, 1 << 20).decode(), ""
    while "dropped" not in second:
        second += os.read(read, 1 << 20).decode()
    writer.write("the last one\n")
    lines = (first + second).splitlines() + read_all(read, "the last one")
    told = [index for index, line in enumerate(lines) if "dropped" in line]
    numbers = [int(line[:4]) for line in lines if re.match(r"\d{4} x", line)]
    dropped = sum(int(re.findall(r"\d+", lines[index])[0]) for index in told)
    assert numbers == sorted(numbers)
    assert len(numbers) + dropped == 5000
    assert 1000 <= len(numbers) < 5000
    assert writer.flush(within_s=30)


def test_words_of_more_than_a_pipe_come_whole_to_a_slow_reader(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, stream = pipe
    writer = NonBlockingWriter(stream)
    text = "é" * 300_000
    writer.write(f"{text}\nend\n")
    data = b""
    while not data.endswith(b"end\n"):
        data += os.read(read, 1 << 16)
    assert data.decode() == f"{text}\nend\n"


def test_a_reader_who_left_is_no_error(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, stream = pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), read)
    writer = NonBlockingWriter(stream)
    writer.write("x\n")
    assert writer.flush(within_s=30)


def test_a_file_is_written_at_once() -> None:
    stream = io.StringIO()
    NonBlockingWriter(stream).write("x\n")
    assert stream.getvalue() == "x\n"


def test_a_server_goes_on_and_ends_though_nobody_reads_its_log(tmp_path: object) -> None:
    said = f"{tmp_path}/said"
    process = subprocess.Popen([sys.executable, "-c", SERVE, said], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    with open(said) as file:
        assert file.read() == "not waited\n"
