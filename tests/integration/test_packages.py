"""The source distribution and the wheel built from it: both are whole, and the wheel serves without the checkout."""

import json
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.serving import ROOT, serve
from support.source import ROOTS

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy, since the build writes into its folder."""
    folder = tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored, symlinks=True)
    run(
        sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=source
    )
    shutil.rmtree(source)
    (file,) = folder.glob("quire-*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Its build finds the C++ kernels of this checkout compiled already: that would take minutes."""
    built = sdist.parent / "built"
    (built / "quire_kernels").mkdir(parents=True)
    for library in (ROOT / "kernels" / "quire_kernels").glob("_cpu.*.so"):
        shutil.copyfile(library, built / "quire_kernels" / library.name)
    configuration = sdist.parent / "setup.cfg"
    configuration.write_text(f"[build]\nbuild_lib = {built}\n")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run("env", f"DIST_EXTRA_CONFIG={configuration}", *pip, "--wheel-dir", sdist.parent, sdist, cwd=sdist.parent)
    (file,) = sdist.parent.glob("quire-*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment with the wheel, and with the packages of this one, but not its Quire."""
    environment = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-compile")
    run(*pip, wheel, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path file adds folders without reading the path files in them: an editable Quire is one.
    (packages / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    return python


def package_files() -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for package, root in ROOTS.items()
        for path in (root / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


def test_the_sdist_holds_the_sources_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "csrc").iterdir()}
    assert kernels | {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"} <= names
    assert not {name for name in names if name.startswith(("tests/", "docs/", "model_repository/"))}
    assert not {name for name in names if name.endswith((".pyc", ".so", ".png"))}


def test_the_wheel_holds_every_module_the_kernels_and_what_operators_need(wheel: Path, python: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    installed = {name for name in names if name.partition("/")[0] in ROOTS}
    kernels = {name for name in installed if name.startswith("quire_kernels/_cpu.")}
    assert installed - kernels == package_files()
    assert kernels or shutil.which("g++") is None
    share = python.parent.parent / "share" / "quire"
    places = {
        "backends/quire": "backend/quire",
        "grafana": "monitoring/grafana/dashboards",
        "prometheus": "monitoring/prometheus",
    }
    for place, folder in places.items():
        assert (files := list((share / place).iterdir()))
        assert all(file.read_bytes() == (ROOT / folder / file.name).read_bytes() for file in files)


def test_the_command_and_every_package_come_from_the_wheel(python: Path, tmp_path: Path) -> None:
    version = run(python.parent / "quire", "--version", cwd=tmp_path)
    assert f'version = "{version.split()[1]}"' in (ROOT / "pyproject.toml").read_text().splitlines()
    script = f"import json; print(json.dumps([__import__(name).__file__ for name in {list(ROOTS)}]))"
    for file in json.loads(run(python, "-c", script, cwd=tmp_path)):
        assert Path(file).is_relative_to(python.parent.parent)


@pytest.mark.server
def test_the_wheel_serves_a_model(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(python))
    with serve("--model", str(ROOT / "model_repository" / "tinypy" / "1" / "model")) as server:
        ask = f"print(Client({server.grpc!r}).generate('model', 'def fib(', max_tokens=8).text)"
        script = f"from quire_client import Client; {ask}"
        assert run(python, "-c", script, cwd=tmp_path).strip()
