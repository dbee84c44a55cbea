"""`quire serve`: from options to a running tritonserver."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from quire_cli import dashboard as dashboards
from quire_cli import openai
from quire_cli.console import Console
from quire_cli.dashboard import Dashboard
from quire_cli.demo import NAME, is_demo, resolve_model
from quire_cli.errors import CommandError, UsageError, has_working_directory
from quire_cli.model_repository import find_repository, models_of, write_model
from quire_cli.openai import Gateway, read_api_keys
from quire_cli.options import ServeOptions
from quire_cli.ports import Endpoint, ReservedPorts, resolve
from quire_cli.server.companion import Companion
from quire_cli.server.health import Health, HealthServer
from quire_cli.server.launch import ServerFlags, compose_backends, has_gpu, restrictions, server_environment, shows_log
from quire_cli.server.loaded_models import LoadedModels
from quire_cli.server.model_config import check_model_configs
from quire_cli.server.run_directory import RunDirectory, is_plain, sweep
from quire_cli.server.supervisor import Service, blocked_signals
from quire_cli.server.tritonserver import TritonServer, find_tritonserver
from quire_cli.server.workarounds import workarounds_for

# The service of each port: its name in the ready line, and the flag that turns it off.
_SERVICES = {"grpc": "allow-grpc", "http": "allow-http", "metrics": "allow-metrics"}


def serve(options: ServeOptions) -> int:
    """Serve until a signal stops it.

    Returns:
        The exit code.

    Raises:
        CommandError: it could not start, or ended badly.
    """
    console = Console()
    flags = ServerFlags(tuple(options.server_flags or ()))
    api_keys = read_api_keys(options.api_key or (), options.api_key_file)
    repository = _repository(options, flags, console)
    server = find_tritonserver()
    if removed := sweep():
        console.line(f"quire: removed what an earlier run left behind: {removed}")
    if options.model is not None and is_demo(options.model):
        options = replace(options, model=resolve_model(options.model, yes=options.yes), name=options.name or NAME)
    with ReservedPorts() as ports:
        endpoints = _endpoints(options, flags, ports)
        health = Health(metrics=str(endpoints["metrics"]) if "metrics" in endpoints else "")
        health_endpoint = _own_endpoint("health", 8003, options.health_port, options.host, ports)
        with (
            blocked_signals(),
            console,
            RunDirectory() as run,
            HealthServer(health_endpoint, health) as health_server,
            ExitStack() as running,
        ):
            shown = {**endpoints, "health": health_server.endpoint}
            companions = list(_companions(options, api_keys, shown, ports, console))
            environment = dict(run.environment)
            for companion in companions:
                running.enter_context(companion)
                environment |= companion.server_environment
            if options.model is not None:
                repository = run.path / "models"
                write_model(repository, options.model, options.name)
            models = _loaded_models(flags, repository)
            defaults = _defaults(options, flags, server, run, repository, endpoints)
            return Service(
                command=lambda: [str(server.binary), *(models.flags(flags) if models else flags).merge(defaults)],
                environment=server_environment(server, environment),
                endpoints=endpoints,
                ready_line="quire: ready " + " ".join(f"{service}={endpoint}" for service, endpoint in shown.items()),
                what=f"loading {options.model or repository or 'the models'}",
                run_directory=run,
                health=health,
                console=console,
                companions=companions,
                models=models,
                workarounds=workarounds_for(server.release, run.temporary),
                needs_stub=_needs_stub(repository, flags),
                unnoticed_s=server.unnoticed_s,
                drain_timeout_s=options.drain_timeout_s,
                show_whole_log=options.verbose or shows_log(flags),
            ).run()


def _repository(options: ServeOptions, flags: ServerFlags, console: Console) -> Path | None:
    """The repository to serve; None if one is made for `--model`, or tritonserver's own flags name it."""
    if not has_working_directory():
        raise CommandError("the working directory no longer exists; change to one that does")
    if not is_plain(Path(flags.values.get("model-repository", ""))):
        raise UsageError(
            "tritonserver cannot serve from a path with a space or another special character; "
            "quire can: give it before the --, as --model-repository"
        )
    if options.model is not None or "model-repository" in flags.values:
        return None
    repository = find_repository(options.model_repository)
    for model in models_of(repository):
        if not is_plain(Path(model.name)):
            raise CommandError(
                f"the model folder {model} cannot be served: tritonserver starts its processes with an unquoted shell "
                "command; give it a name of letters, digits, '_', '-' and '.'"
            )
    _check_model_configs(repository, flags, console)
    return repository


def _check_model_configs(repository: Path, flags: ServerFlags, console: Console) -> None:
    """Raise what is wrong with a model's `config.pbtxt`, or log it if the server starts all the same."""
    try:
        check_model_configs(repository, lambda text: console.line(f"quire: {text}"))
    except CommandError as error:
        if flags.values.get("model-control-mode", "none") == "none" and not flags.is_off("exit-on-error"):
            raise
        console.line(f"quire: {error}")


def _plain_path(repository: Path, run: RunDirectory) -> Path:
    """The repository, or a link to it that a shell command can contain."""
    if is_plain(repository):
        return repository
    link = run.path / "model_repository"
    link.symlink_to(repository)
    return link


def _needs_stub(repository: Path | None, flags: ServerFlags) -> bool:
    """Whether a model that is loaded at the start is certain to run in Python."""
    if repository is None or flags.values.get("model-control-mode", "none") != "none":
        return False
    return any('"quire"' in file.read_text(errors="replace") for file in repository.glob("*/config.pbtxt"))


def _endpoints(options: ServeOptions, flags: ServerFlags, ports: ReservedPorts) -> dict[str, Endpoint]:
    """Where each service will listen, by name; services that are turned off are left out."""
    if flags.is_off("allow-http"):
        raise UsageError("--allow-http=false cannot be used here, quire probes readiness over HTTP; leave it out")
    numbers = {"grpc": options.grpc_port, "http": options.http_port, "metrics": options.metrics_port}
    wanted = {}
    for service, allow in _SERVICES.items():
        if not flags.is_off(allow):
            given = flags.values.get(f"{service}-address")
            host = resolve(options.host if given is None else given)
            if given not in (None, host):
                raise UsageError(
                    f"--{service}-address is {given}: tritonserver takes an address there, not a name; give {host}"
                )
            wanted[f"{service}-port"] = Endpoint(host, _port(f"{service}-port", flags, numbers[service]))
    return {option.removesuffix("-port"): endpoint for option, endpoint in ports.take(wanted).items()}


def _companions(
    options: ServeOptions, api_keys: tuple[str, ...], endpoints: Mapping[str, Endpoint], ports: ReservedPorts,
    console: Console,
) -> Iterator[Companion]:  # fmt: skip
    """What runs beside the server, not yet started."""
    if options.openai:
        missing = openai.how_to_install()
        if not missing and "grpc" not in endpoints:
            missing = "it needs the server's gRPC port, which is turned off"
        if missing:
            console.line(f"quire: no OpenAI gateway: {missing}")
        else:
            endpoint = _own_endpoint("openai", 9000, options.openai_port, options.host, ports)
            yield Gateway(endpoint, endpoints["grpc"], api_keys, console)
    if options.dashboard:
        missing = dashboards.how_to_install()
        if not missing and not endpoints.keys() >= {"grpc", "metrics"}:
            missing = "it needs the server's gRPC and metrics ports, and one of them is turned off"
        if missing:
            console.line(f"quire: no dashboard: {missing}")
        else:
            endpoint = _own_endpoint("dashboard", 8501, options.dashboard_port, options.host, ports)
            yield Dashboard(endpoint, endpoints, console)


def _own_endpoint(service: str, default: int, wanted: int | None, host: str, ports: ReservedPorts) -> Endpoint:
    """Where a service of `quire serve` itself listens."""
    option, host = f"{service}-port", resolve(host)
    try:
        return ports.take({option: Endpoint(host, default if wanted is None else wanted)})[option]
    except CommandError:
        if wanted is not None:
            raise
        # With two servers on one machine, the second must not fail because of a page.
        return ports.take({option: Endpoint(host, 0)})[option]


def _port(flag: str, flags: ServerFlags, default: int) -> int:
    text = flags.values.get(flag, str(default))
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"--{flag} is {text!r}; it must be a number from 0 to 65535")
    return int(text)


def _loaded_models(flags: ServerFlags, repository: Path | None) -> LoadedModels | None:
    """Keeps track of the models, if they come and go while the server runs or may be missing from the start."""
    mode, may_miss_some = flags.values.get("model-control-mode", "none"), flags.is_off("exit-on-error")
    asked = flags.all_values("load-model")
    if mode == "none":
        if not may_miss_some:
            return None
        asked = [model.name for model in models_of(repository)] if repository else []
    return LoadedModels(asked, follow_repository=mode == "poll", may_miss_some=may_miss_some)


def _defaults(
    options: ServeOptions, flags: ServerFlags, server: TritonServer, run: RunDirectory, repository: Path | None,
    endpoints: dict[str, Endpoint],
) -> list[tuple[str, str]]:  # fmt: skip
    """Our flags for tritonserver."""
    defaults = [
        ("model-repository", str(repository and _plain_path(repository, run))),
        ("backend-directory", str(compose_backends(server, run.path))),
        ("backend-config", f"python,shm-region-prefix-name={run.run_id.shared_memory_prefix}"),
        ("exit-timeout-secs", str(options.drain_timeout_s)),
        # A client's trace goes on in its request; of the parameters that other headers would become, none is known.
        *((f"{protocol}-header-forward-pattern", "(?i)traceparent") for protocol in ("http", "grpc")),
        *restrictions(flags),
    ]
    if server.cache_directory.is_dir():
        defaults.append(("cache-directory", str(server.cache_directory)))
    for service, endpoint in endpoints.items():
        defaults += [(f"{service}-address", endpoint.host), (f"{service}-port", str(endpoint.port))]
    if not has_gpu():
        # Without a driver, both only fail, with several lines of log.
        defaults += [("allow-gpu-metrics", "false"), ("pinned-memory-pool-byte-size", "0")]
    return defaults
