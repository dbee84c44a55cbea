"""The options of commands, each declared once: as a field of the dataclass that the command works with.

`with_options` makes Typer's options, their help and their groups of these fields. Nothing heavy is imported here, since
every `--help` imports it.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from quire_load.arrivals import Arrivals
from quire_load.datasets import DatasetOptions

from quire_cli.errors import UsageError

if TYPE_CHECKING:
    from quire_load.report import Targets

# Only declared here: `run` checks for it itself, since an error can occur before options are parsed.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Checkpoint = Annotated[Path, ("PATH", "A Hugging Face folder, a GGUF file, or demo.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Engine settings, as in model.json; values are JSON, else strings."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download the demo model without asking, if it is not here.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")]
ServedModel = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model, as the server has it.")]
Url = Annotated[str, ("HOST:PORT", "The server's gRPC.")]
SERVER_GRPC = "127.0.0.1:8001"
_MODELS, _ADDRESSES, _GATEWAY = "Models", "Addresses", "OpenAI gateway"
"""Groups of the options of `quire serve`."""
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as Typer takes it: in place of a parameter that is a dataclass, one per field that is an option.

    An option is `Annotated` with a `typer.Option`, or with its help, or with `(metavar, help)` or `(flag, metavar,
    help)`. A field may be a dataclass itself. Fields of one name are one option. Every command has `--debug`.
    """
    given = inspect.signature(command).parameters
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in given.items():
        if is_dataclass(parameter.annotation):
            parameters |= _options_of(parameter.annotation)
        else:
            parameters[name] = parameter.replace(annotation=_declared(parameter.annotation))
    parameters["_debug"] = inspect.Parameter("_debug", _KEYWORD, default=False, annotation=Debug)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        with usage_errors():
            arguments = {
                name: _make(parameter.annotation, values) if is_dataclass(parameter.annotation) else values[name]
                for name, parameter in given.items()
            }
        return command(**arguments)

    ordered = [parameter.replace(kind=_KEYWORD) for parameter in parameters.values()]
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return run


@contextmanager
def usage_errors() -> Iterator[None]:
    """A value that is rejected here was given on the command line."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def _options_of(record: Any) -> dict[str, inspect.Parameter]:
    """A parameter for each option among the fields of a dataclass."""
    found: dict[str, inspect.Parameter] = {}
    for item in fields(record):
        if is_dataclass(item.type):
            found |= {name: option for name, option in _options_of(item.type).items() if name not in found}
        elif _is_option(item):
            default = inspect.Parameter.empty if item.default is MISSING else item.default
            default = None if default == () else default
            annotation = _declared(item.type)
            found[item.name] = inspect.Parameter(item.name, _KEYWORD, default=default, annotation=annotation)
    return found


def _declared(annotation: Any) -> Any:
    """The annotation of an option as Typer takes it; a tuple of texts is an option that may be repeated."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, what = annotation.__origin__, annotation.__metadata__[0]
    if isinstance(what, str):
        what = typer.Option(help=what)
    elif isinstance(what, tuple):
        *flag, metavar, text = what
        what = typer.Option(*flag, metavar=metavar, help=text)
    return Annotated[list[str] | None if kind == tuple[str, ...] else kind, what]


def _make(record: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass of the options that were given."""
    options = [item for item in fields(record) if _is_option(item)]
    given = {item.name: values[item.name] for item in options}
    given |= {item.name: tuple(given[item.name] or ()) for item in options if item.default == ()}
    inner = {item.name: _make(item.type, values) for item in fields(record) if is_dataclass(item.type)}
    return record(**given, **inner)


def _is_option(item: Field[Any]) -> bool:
    return get_origin(item.type) is Annotated


def _port(text: str = "") -> Any:
    return typer.Option(min=0, max=65535, metavar="PORT", help=text, rich_help_panel=_ADDRESSES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of `quire serve`."""

    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Hugging Face folder, a GGUF file, or demo.", rich_help_panel=_MODELS),
    ] = None
    name: Annotated[str | None, typer.Option(help="Of --model; default: its folder's.", rich_help_panel=_MODELS)] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download demo without asking.", rich_help_panel=_MODELS)] = (
        False
    )
    model_repository: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Default: ./model_repository, or tinypy's.", rich_help_panel=_MODELS),
    ] = None
    host: Annotated[
        str, typer.Option(help="Name or IPv4 address. Clients are not authenticated.", rich_help_panel=_ADDRESSES)
    ] = "127.0.0.1"
    http_port: Annotated[int, _port()] = 8000
    grpc_port: Annotated[int, _port()] = 8001
    metrics_port: Annotated[int, _port()] = 8002
    health_port: Annotated[int | None, _port("Default: 8003, or a free one.")] = None
    openai_port: Annotated[int | None, _port("Default: 9000, or a free one.")] = None
    dashboard_port: Annotated[int | None, _port("Default: 8501, or a free one.")] = None
    openai: Annotated[
        bool, typer.Option("--openai/--no-openai", help="Start it, if installed.", rich_help_panel=_GATEWAY)
    ] = True
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Required of clients; repeatable; ps shows it.", rich_help_panel=_GATEWAY),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Such keys, one a line; also QUIRE_OPENAI_API_KEYS.", rich_help_panel=_GATEWAY
        ),
    ] = None
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Start the dashboard, if installed.")
    ] = True
    drain_timeout_s: Annotated[
        int,
        typer.Option("--drain-timeout", min=0, max=86400, metavar="S", help="Seconds for running requests at a stop."),
    ] = 30
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tritonserver's whole log.")] = False
    server_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS...]", help="For tritonserver; they win over those set here."),
    ] = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model_repository is not None:
            raise UsageError("--model and --model-repository are both given; give one of them")
        if self.name is not None and self.model is None:
            raise UsageError("--name names the model of --model; give that as well")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOptions:
    """Options of `quire join`."""

    start_rank: Annotated[
        int,
        typer.Option(
            "--data-parallel-start-rank", min=1, metavar="RANK", help="Which replica the first engine here is."
        ),
    ]
    model_repository: Annotated[Path | None, ("DIR", "With the front's model.json; default: as of quire serve.")] = None
    name: Annotated[str | None, "Of the model; default: the repository's only one."] = None
    data_parallel_size_local: Annotated[int, typer.Option(min=1, metavar="N", help="Engines of this host.")] = 1
    data_parallel_address: Annotated[
        str | None, ("HOST", "The front's; this and the two below: default: as in model.json.")
    ] = None
    data_parallel_rpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="PORT", help="Where the front listens for engines.")
    ] = None
    data_parallel_key_file: Annotated[
        Path | None, ("FILE", "This host's keys, which trust the front: quire keys host.")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from model.json, as of `EngineConfig.for_headless`."""
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name.startswith("data_parallel_")}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardOptions:
    """Options of `quire dashboard`: what it shows, and where it listens."""

    url: Annotated[
        list[str] | None,
        ("HOST:PORT", "A server's gRPC; may be repeated, for several servers.  [default: 127.0.0.1:8001]"),
    ] = None
    metrics: Annotated[
        list[str] | None,
        (
            "HOST:PORT",
            "A server's /metrics; for several servers as often as --url, in the same order.  "
            "[default: port 8002 of each server's host]",
        ),
    ] = None
    http: Annotated[
        list[str] | None,
        (
            "HOST:PORT",
            "Likewise a server's HTTP, which commands are shown with.  [default: port 8000 of each server's host]",
        ),
    ] = None
    prometheus: Annotated[
        str,
        (
            "URL",
            "A Prometheus that scrapes the servers; without, history begins now. Of several servers, it must know "
            "each by its --metrics in the label instance.",
        ),
    ] = ""
    traces: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="QUIRE_DASHBOARD_TRACES",
            help="Where a trace is seen, with {trace_id} in it, such as http://127.0.0.1:16686/trace/{trace_id}.",
        ),
    ] = ""
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT")] = 8501
    host: Annotated[str, "Address to listen on; another than loopback needs a token."] = "127.0.0.1"
    token: Annotated[str, "What visitors must know; better kept from ps, in QUIRE_DASHBOARD_TOKEN."] = ""


BACKENDS = {"grpc": "127.0.0.1:8001", "generate-stream": "http://127.0.0.1:8000", "openai": "http://127.0.0.1:9000",
            "openai-chat": "http://127.0.0.1:9000"}  # fmt: skip
"""Endpoint → where `quire serve` has it."""
TASKS = {"generate": tuple(BACKENDS), "embed": ("grpc", "openai")}
"""What is measured → the endpoints that offer it."""
METRICS_PORT = 8002


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What `quire bench serve` sends where, and what is good."""

    model: Annotated[str, "The model's name at the server."]
    task: Annotated[str, "generate, or embed: with grpc and openai."] = "generate"
    backend: Annotated[str, "grpc, generate-stream, openai or openai-chat."] = "grpc"
    base_url: Annotated[str, ("URL", "HOST:PORT for grpc, else http://HOST:PORT; default: quire serve's.")] = ""
    metrics: Annotated[str, ("HOST:PORT", "The server's /metrics; default: port 8002 of the same host.")] = ""
    num_prompts: Annotated[int, "Requests in all."] = 100
    num_warmups: Annotated[int, "Requests before them that do not count."] = 2
    arrivals: Arrivals = field(default_factory=Arrivals)
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    tokenizer: Annotated[Path | None, ("PATH", "A checkpoint's folder: whose tokens prompts are made of.")] = None
    seed: Annotated[int, "Of prompts, lengths and arrivals."] = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further sampling parameters of every request, or those of the task."""
    slo_classes: Mapping[str, float] = field(default_factory=dict)
    """Class → weight; empty: no request names one."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """LoRA adapter → weight, likewise."""
    goodput: Mapping[str, "Targets"] = field(default_factory=dict)
    request_timeout_s: Annotated[float, ("--request-timeout", "S", "A request is cancelled after this long.")] = 600.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}")
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if self.backend not in TASKS[self.task]:
            allowed = " or ".join(TASKS[self.task])
            raise ValueError(f"backend is {self.backend!r}; with task {self.task} it must be {allowed}")
        if self.num_warmups < 0:
            raise ValueError(f"num_warmups is {self.num_warmups}; it must be at least 0")
        if not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout is {self.request_timeout_s}; it must be a number of seconds above 0")
        has_scheme = "://" in self.base_url
        if self.base_url and has_scheme == (self.backend == "grpc"):
            form = "HOST:PORT" if self.backend == "grpc" else "http://HOST:PORT"
            raise ValueError(f"base_url is {self.base_url!r}; for backend {self.backend} it must be {form}")

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url or BACKENDS[self.backend]

    @property
    def metrics_endpoint(self) -> str:
        """Where /metrics is."""
        host = self.url.rpartition("://")[2].rpartition(":")[0].rpartition("/")[2]
        return self.metrics or f"{host or '127.0.0.1'}:{METRICS_PORT}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions:
    """What `quire bench latency` computes again and again, under the names of `vllm bench latency`."""

    input_len: Annotated[int, "Tokens per prompt."] = 32
    output_len: Annotated[int, "Tokens per answer."] = 128
    batch_size: Annotated[int, "Requests that run together."] = 8
    num_iters_warmup: Annotated[int, "Batches that do not count."] = 10
    num_iters: Annotated[int, "Batches that are measured."] = 30

    def __post_init__(self) -> None:
        for item in fields(self):
            least = 0 if item.name == "num_iters_warmup" else 1
            if getattr(self, item.name) < least:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; it must be at least {least}")


SPACE: Mapping[str, Sequence[Any]] = {
    "max_num_seqs": [16, 128, 256],
    "max_num_batched_tokens": [512, 1024, 4096],
    "long_prefill_token_threshold": [256],
    "speculative_config": [{"method": "suffix"}],
    "quantization": ["int8"],
    "tensor_parallel_size": [2],
}
"""What is tried beside the defaults unless --try says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What `quire tune` searches."""

    model: Checkpoint
    slo: Annotated[str, ("KEY:MS,...", "The objectives: ttft, tpot, e2el in milliseconds.")]
    dataset: DatasetOptions
    settings: Settings = None
    """Those that stay as they are."""
    attainment: Annotated[float, "Which share of the requests has to meet them."] = 0.95
    tried: Annotated[
        list[str] | None,
        ("--try", "KEY=[VALUE,...]", "Values of a setting, in JSON; null leaves it out."),
    ] = None
    journal: Annotated[Path, ("FILE", "Keeps each run; the same command goes on from it.")] = Path("quire-tune.jsonl")
    start_rate: Annotated[float, "Requests per second of the first run."] = 1.0
    seconds: Annotated[float, "How long requests come in each run."] = 20.0
    precision: Annotated[float, "Of rates, as a share of them."] = 0.1
    burstiness: Annotated[float, "As in quire bench serve."] = 1.0
    seed: Annotated[int, "Of prompts, lengths and arrivals."] = 0

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment is {self.attainment}; it must be above 0 and at most 1")
        for name in ("start_rate", "seconds", "precision"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0")
        self.as_dict()  # raises what is wrong with the objectives
        both = sorted(set(self.space) & set(self.fixed))
        if both:
            raise ValueError(f"{both[0]} is tried, and has a value as well; it can be one of them")

    @property
    def targets(self) -> "Targets":
        """Those of `slo`."""
        from quire_load.report import parse_goodput

        try:
            targets = parse_goodput([self.slo])
        except ValueError as error:
            raise ValueError(str(error).replace("goodput is", "slo is")) from None
        if list(targets) != [""]:
            raise ValueError(f"slo is {self.slo!r}; it has no class here: the objectives are of all requests")
        return targets[""]

    @property
    def fixed(self) -> dict[str, Any]:
        """Those of `settings`, by name."""
        from quire_cli.model_repository import parse_settings

        return parse_settings(self.settings or [])

    @property
    def space(self) -> dict[str, Sequence[Any]]:
        """The values of `tried`, by setting; without any, `SPACE`."""
        found: dict[str, Sequence[Any]] = {}
        for item in self.tried or ():
            name, _, text = item.partition("=")
            try:
                values = json.loads(text)
            except ValueError:
                values = None
            if not name or not isinstance(values, list) or not values:
                raise ValueError(f"try is {item!r}; it must be KEY=[VALUE, …] with JSON values")
            found[name] = values
        return found or dict(SPACE)

    def as_dict(self) -> dict[str, Any]:
        """What makes two searches the same one. More values may be tried: what is known of the others stays true."""
        return {
            "model": str(self.model.resolve()), "settings": self.fixed, "slo": asdict(self.targets),
            "attainment": self.attainment, "seconds": self.seconds, "burstiness": self.burstiness,
            "dataset": {name: str(value) for name, value in asdict(self.dataset).items()}, "seed": self.seed,
        }  # fmt: skip
