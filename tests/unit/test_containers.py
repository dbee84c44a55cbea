"""The image and compose: what they start is what `quire serve` takes, and their health checks say what it says."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import typer.main
import yaml
from quire_cli.health import Health, HealthServer
from quire_cli.main import app
from quire_cli.ports import Endpoint
from support.serving import ROOT

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose" / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
IMAGE_COMMAND = json.loads(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
IMAGE_CHECK = json.loads(re.search(r"^HEALTHCHECK .*\\\n  CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
COMMANDS = [IMAGE_COMMAND, SERVICES["tritonserver"]["command"]]


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


def test_compose_publishes_every_port_that_clients_and_health_checks_use() -> None:
    given = options(SERVICES["tritonserver"]["command"])
    published = {tuple(map(int, port.split(":")[1:])) for port in SERVICES["tritonserver"]["ports"]}
    ports = {given[f"{name}_port"] for name in ("http", "grpc", "metrics", "health", "openai")}
    assert published == {(port, port) for port in ports}


def test_compose_gives_a_drain_time_before_it_kills() -> None:
    service = SERVICES["tritonserver"]
    assert int(service["stop_grace_period"].removesuffix("s")) > options(service["command"])["drain_timeout"]


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
