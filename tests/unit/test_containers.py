"""The image and compose: what they start is what `quire serve` takes, and their health checks say what it says."""

import json
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from quire_cli.main import app
from quire_cli.ports import Endpoint
from quire_cli.server.health import Health, HealthServer
from support.serving import ROOT

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose" / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
IMAGE_COMMAND = json.loads(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
IMAGE_CHECK = json.loads(re.search(r"^HEALTHCHECK .*\\\n  CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
COMMANDS = [IMAGE_COMMAND, SERVICES["tritonserver"]["command"]]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD, FINAL = re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:]
"""The image's two stages."""


def options(command: list[str]) -> dict[str, Any]:
    """What the program makes of the command line."""
    assert command[:2] == ["quire", "serve"], "its supervisor starts again what dies"
    group: Any = typer.main.get_command(app)
    return group.commands["serve"].make_context("serve", command[2:]).params  # type: ignore[no-any-return]


@pytest.mark.parametrize("command", COMMANDS, ids=["image", "compose"])
def test_a_container_runs_the_supervisor_and_the_gateway_on_its_own_addresses(command: list[str]) -> None:
    given = options(command)
    assert given["host"] == "0.0.0.0"
    assert given["openai"]
    assert not given["server_flags"], "such flags could open what quire serve closes"
    assert not given["dashboard"]


@pytest.mark.parametrize("command", COMMANDS, ids=["image", "compose"])
def test_ports_are_those_that_the_image_exposes(command: list[str]) -> None:
    exposed = set(map(int, re.search(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)[1].split()))  # type: ignore[index]
    given = options(command)
    assert {given[f"{name}_port"] for name in ("http", "grpc", "metrics", "health", "openai")} == exposed - {8501}


def test_compose_starts_what_the_image_starts() -> None:
    image, compose = (options(command) for command in COMMANDS)
    assert {name for name in image if image[name] != compose[name]} == {"drain_timeout_s", "model_repository"}
    service = SERVICES["tritonserver"]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    (cache,) = re.findall(r"^ENV .*XDG_CACHE_HOME=(\S+)", DOCKERFILE, re.MULTILINE)
    assert f"cache:{cache}" in service["volumes"]
    assert f"--mode=1777 {cache}\n" in FINAL, "a volume takes the mode of the image's folder, for any user"


def test_the_image_has_dependencies_before_sources_and_the_wheel_alone() -> None:
    steps = re.findall(r"^(COPY|RUN|USER|ENV|CMD) (.*)$", BUILD, re.MULTILINE)
    copies = [arguments for step, arguments in steps if step == "COPY"]
    assert copies == ["pyproject.toml ./", ". ."], "a change of sources does not change the list of dependencies"
    order = [
        DOCKERFILE.rindex(text) for text in ("--requirement", "/wheels/*.whl", "COPY model_repository", "VERSION=")
    ]
    assert order == sorted(order)
    from_context = re.findall(r"^COPY (?!--from)(\S+) ", FINAL, re.MULTILINE)
    assert from_context == ["backend/quire", "model_repository"]
    assert all((ROOT / path).exists() for path in from_context)
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{label}=" in FINAL
    users = re.findall(r"^USER (.*)$", FINAL, re.MULTILINE)
    assert users == ["1000:1000"], "as a number, so that Kubernetes can tell that it is not root"


def test_the_build_gets_the_sources_and_neither_tests_nor_docs() -> None:
    ignored, *allowed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == "*"
    names = {line[1:] for line in allowed if line.startswith("!")}
    assert not names & {"tests", "docs", ".git", ".venv", ".ci"}
    where = re.search(r"^where = \[(.*)\]$", PROJECT, re.MULTILINE)[1]  # type: ignore[index]
    readme = re.search(r'^readme = "(.*)"$', PROJECT, re.MULTILINE)[1]  # type: ignore[index]
    needed = {
        *re.findall(r'"(.*?)"', where),
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "LICENSE",
        "model_repository",
    }
    assert needed <= names
    assert readme.endswith(".md")
    assert "*.md" in names
    hidden = [line for line in allowed if not line.startswith("!")]
    assert hidden == ["**/__pycache__", "**/*.egg-info", "**/*.so"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib, which the image's Python has")
@pytest.mark.parametrize("given", ["", "server,"])
def test_the_images_requirements_are_the_projects(given: str) -> None:
    import tomllib

    extras, script = re.search(  # type: ignore[union-attr]
        r"""python3 - "\$\{EXTRAS\}(.*?)" > /requirements\.txt <<'EOF'\n(.*?)^EOF$""", BUILD, re.MULTILINE | re.DOTALL
    ).groups()
    extras = given + extras
    done = subprocess.run(
        [sys.executable, "-", extras], input=script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    project = tomllib.loads(PROJECT)["project"]
    expected = [*project["dependencies"]]
    for extra in extras.split(","):
        expected += project["optional-dependencies"][extra]
    found = [Requirement(line) for line in done.stdout.splitlines()]
    assert found == [Requirement(line) for line in expected]
    assert not [one for one in found if one.name == "quire"], "an extra of extras would install an older quire"
    torch = subprocess.run(
        ["grep", re.search(r"grep '(\^torch.*?)'", FINAL)[1]],  # type: ignore[index]
        input=done.stdout, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert [Requirement(line).name for line in torch.stdout.splitlines()] == ["torch"]


def test_compose_publishes_every_port_that_clients_and_health_checks_use() -> None:
    given = options(SERVICES["tritonserver"]["command"])
    published = {tuple(map(int, port.split(":")[1:])) for port in SERVICES["tritonserver"]["ports"]}
    ports = {given[f"{name}_port"] for name in ("http", "grpc", "metrics", "health", "openai")}
    assert published == {(port, port) for port in ports}


def test_compose_gives_a_drain_time_before_it_kills() -> None:
    service = SERVICES["tritonserver"]
    assert int(service["stop_grace_period"].removesuffix("s")) > options(service["command"])["drain_timeout_s"]


def test_the_dashboards_container_has_a_check_of_its_own() -> None:
    assert "healthcheck" not in SERVICES["tritonserver"], "the image's holds"
    group: Any = typer.main.get_command(app)
    port = group.commands["dashboard"].make_context("dashboard", SERVICES["dashboard"]["command"][2:]).params["port"]
    assert SERVICES["dashboard"]["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/_stcore/health"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the image's health check is curl")
def test_the_images_health_check_says_what_health_says() -> None:
    health = Health()
    with HealthServer(Endpoint("127.0.0.1", 0), health) as server:
        declared = f"127.0.0.1:{options(IMAGE_COMMAND)['health_port']}"
        check = [word.replace(declared, str(server.endpoint)) for word in IMAGE_CHECK]
        assert check != IMAGE_CHECK
        assert subprocess.run(check, timeout=30).returncode != 0, "while the server is being started"
        health.write([])
        assert subprocess.run(check, timeout=30).returncode == 0
        health.write(["the engine was killed by SIGKILL; it is being restarted"])
        assert subprocess.run(check, timeout=30).returncode != 0
    assert subprocess.run(check, timeout=30).returncode != 0, "once nothing listens"
