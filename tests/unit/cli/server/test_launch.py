"""What tritonserver is started with."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from quire_cli.errors import CommandError, UsageError
from quire_cli.server import tritonserver
from quire_cli.server.launch import (
    RESTRICTED_APIS,
    ServerFlags,
    compose_backends,
    restrictions,
    server_environment,
    shows_log,
)
from quire_cli.server.tritonserver import PYTHON, TritonServer, find_tritonserver, libpython


def test_given_flags_win_and_come_last() -> None:
    flags = ServerFlags(("--http-port=1", "--log-verbose", "2", "--strict-readiness", "--backend-config=python,x=1"))
    assert flags.values == {
        "http-port": "1",
        "log-verbose": "2",
        "strict-readiness": "",
        "backend-config": "python,x=1",
    }
    defaults = [("http-port", "8000"), ("grpc-port", "8001"), ("backend-config", "python,shm-region-prefix-name=q-")]
    assert flags.merge(defaults) == [
        "--grpc-port=8001", "--backend-config=python,shm-region-prefix-name=q-", *flags.tokens,
    ]  # fmt: skip


def test_own_shared_memory_prefix_replaces_ours() -> None:
    flags = ServerFlags(("--backend-config=python,shm-region-prefix-name=mine",))
    assert flags.merge([("backend-config", "python,shm-region-prefix-name=q-")]) == list(flags.tokens)


def test_stray_argument_is_no_flag() -> None:
    with pytest.raises(UsageError, match="stray"):
        ServerFlags(("stray", "--flag"))


def fake_server(root: Path, *, wheel: bool, stub_python: str = PYTHON) -> Path:
    """The files of an installation, as far as they are looked at; returns the binary."""
    python_backend = root / "backends" / "python"
    stubs = root / "python_backend_stubs" / PYTHON if wheel else python_backend
    for folder in (root / "bin", python_backend, stubs, root / "backends" / "onnxruntime"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "TRITON_VERSION").write_text("9.8.7\n")
    (python_backend / "libtriton_python.so").write_text("so")
    (python_backend / "triton_python_backend_utils.py").write_text("py")
    (stubs / "triton_python_backend_stub").write_bytes(f"\0libpython{stub_python}.so.1.0\0".encode())
    binary = root / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return binary


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is installed but what a test puts into this folder, which is on PATH."""
    monkeypatch.setattr(tritonserver, "_OPT", tmp_path / "nowhere")
    monkeypatch.setattr(tritonserver, "package_folder", lambda name: None)
    monkeypatch.setattr(tritonserver, "libpython", lambda: "libpython.so")
    monkeypatch.setenv("PATH", str(tmp_path / "triton" / "bin"))
    return tmp_path / "triton"


def test_no_server_names_the_places_and_the_mend(only_path: Path) -> None:
    with pytest.raises(CommandError, match=r"PATH, /opt/tritonserver/bin, .*pip install .*\[server\]"):
        find_tritonserver()


def test_server_on_path_is_used_with_all_its_backends(only_path: Path, tmp_path: Path) -> None:
    fake_server(only_path, wheel=False)
    server = find_tritonserver()
    assert (server.origin, server.version) == ("PATH", "9.8.7")
    backends = compose_backends(server, tmp_path / "run")
    assert sorted(path.name for path in backends.iterdir()) == ["onnxruntime", "python", "quire"]
    assert (backends / "python" / "triton_python_backend_stub").is_file()


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.51.0\n", (2, 51)), ("2.9", (2, 9)), ("2.60.0dev", (2, 60)), ("", None), ("2", None), ("r25.07", None)],
)
def test_release_is_read_from_the_version(only_path: Path, version: str, release: tuple[int, int] | None) -> None:
    fake_server(only_path, wheel=False)
    (only_path / "TRITON_VERSION").write_text(version)
    assert find_tritonserver().release == release


@pytest.mark.parametrize(("version", "seconds"), [("2.59.1", 5.0), ("2.60.0", 25.0), ("odd", 25.0)])
def test_newer_releases_have_longer_to_notice_a_dead_stub(only_path: Path, version: str, seconds: float) -> None:
    fake_server(only_path, wheel=False)
    (only_path / "TRITON_VERSION").write_text(version)
    assert find_tritonserver().unnoticed_s == seconds


def test_release_that_cannot_be_read_is_not_known(only_path: Path) -> None:
    fake_server(only_path, wheel=False)
    (only_path / "TRITON_VERSION").unlink()
    (only_path / "TRITON_VERSION").mkdir()
    assert (find_tritonserver().version, find_tritonserver().release) == ("unknown", None)


@pytest.mark.parametrize(("version", "release"), [("0.7.0", (2, 51)), ("9.0", None)])
def test_release_of_the_wheel_is_known_by_the_wheels_version(
    only_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int] | None
) -> None:
    fake_server(only_path, wheel=True)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert next(tritonserver.installations()).release == release


def test_release_of_the_wheels_files_alone_is_not_known(only_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    fake_server(only_path, wheel=True)
    monkeypatch.setattr(metadata, "version", no_package)
    assert next(tritonserver.installations()).release is None


def test_server_of_another_python_is_refused(only_path: Path) -> None:
    fake_server(only_path, wheel=False, stub_python="3.99")
    with pytest.raises(CommandError, match=r"runs Python 3\.99"):
        find_tritonserver()


def test_files_of_the_wheel_are_copied_not_linked(only_path: Path, tmp_path: Path) -> None:
    fake_server(only_path, wheel=True)
    server = next(tritonserver.installations())
    assert server.is_wheel
    python = compose_backends(server, tmp_path / "run") / "python"
    assert not any(path.is_symlink() for path in python.iterdir())


def test_environment_is_that_of_this_python(tmp_path: Path) -> None:
    server = TritonServer(
        binary=tmp_path, origin="", python_backend=tmp_path, stub=tmp_path, library_dirs=(tmp_path / "libs",)
    )
    environment = server_environment(server, {"OWN": "1"})
    assert environment["OWN"] == "1"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    libraries = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert str(tmp_path / "libs") in libraries
    own = libpython()
    if isinstance(own, Path):
        assert libraries.index(str(own.parent)) < libraries.index(str(tmp_path / "libs"))
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert any((Path(path) / "quire_engine" / "llm.py").is_file() for path in paths)
    assert any((Path(path) / "numpy").is_dir() for path in paths)


def closed(flags: ServerFlags) -> dict[str, str]:
    """By flag, the APIs; each is closed with a header that cannot be sent."""
    found = {}
    for flag, value in restrictions(flags):
        apis, _, header = value.partition(":")
        name, _, secret = header.partition("=")
        assert name.isupper()
        assert "\n" in secret.strip()
        found[flag] = apis
    return found


def test_without_flags_of_the_users_all_are_closed_each_time_with_another_value() -> None:
    flags = ServerFlags()
    every = ",".join(RESTRICTED_APIS)
    assert closed(flags) == {"http-restricted-api": every, "grpc-restricted-protocol": every}
    assert dict(restrictions(flags)) != dict(restrictions(flags))
    assert not shows_log(flags)


@pytest.mark.parametrize(
    ("tokens", "http", "is_log_open"),
    [
        (("--http-restricted-api=logging:key=value",), "shared-memory,trace", True),
        (("--http-restricted-api", "trace,shared-memory:key=a:b"), "logging", False),
        (("--http-restricted-api=trace:a=b", "--http-restricted-api=logging:c=d"), "shared-memory", True),
        (("--http-restricted-api=shared-memory,trace,logging:a=b",), None, True),
        (("--http-restricted-api=model-repository:logging=x",), "shared-memory,trace,logging", False),
    ],
)
def test_what_the_user_restricts_himself_is_left_to_him(
    tokens: tuple[str, ...], http: str | None, is_log_open: bool
) -> None:
    flags = ServerFlags(tokens)
    found = closed(flags)
    assert found.get("http-restricted-api") == http
    assert found["grpc-restricted-protocol"] == ",".join(RESTRICTED_APIS)
    assert shows_log(flags) is is_log_open
    merged = flags.merge(restrictions(flags))
    assert merged[-len(tokens) :] == list(tokens)
    assert sum(word.startswith("--http-restricted-api=") for word in merged[: -len(tokens)]) == (http is not None)
