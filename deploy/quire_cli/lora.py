"""`quire lora`: the LoRA adapters of a model that a server serves."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from quire_load.printable import printable

from quire_cli.options import SERVER_GRPC, ServedModel, Url, with_options

if TYPE_CHECKING:
    from quire_client import AdapterInfo, Client

lora_app = typer.Typer(
    help="LoRA adapters of a served model. QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token.",
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter: requests give it as lora_name.")]


@lora_app.command("load")
@with_options
def load(
    model: ServedModel,
    name: Name,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The adapter, in PEFT's format; a folder on the server's host.")
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Replace an adapter of that name.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in memory.")] = False,
    url: Url = SERVER_GRPC,
) -> None:
    """Load an adapter while the model serves; it is there until it is unloaded, or the model is.

    An adapter that is to be there at each start belongs into the setting lora_modules.
    Example: quire lora load tinypy sql /adapters/sql
    """
    path = os.path.abspath(folder) if os.path.isdir(folder) else folder
    with _client(model, url) as client:
        info = client.load_lora(model, name, path, load_inplace=replace)
        if pin:
            info = client.pin_lora(model, name)
    print(f"quire: {model} has the adapter {printable(_line(info))}")


@lora_app.command("unload")
@with_options
def unload(model: ServedModel, name: Name, url: Url = SERVER_GRPC) -> None:
    """Unload an adapter; requests that have begun with it go on. Example: quire lora unload tinypy sql"""
    with _client(model, url) as client:
        client.unload_lora(model, name)
    print(f"quire: {model} has unloaded the adapter {printable(name)}")


@lora_app.command("pin")
@with_options
def pin(model: ServedModel, name: Name, url: Url = SERVER_GRPC) -> None:
    """Keep an adapter in memory until it is unloaded. Example: quire lora pin tinypy sql"""
    with _client(model, url) as client:
        info = client.pin_lora(model, name)
    print(f"quire: {model} has the adapter {printable(_line(info))}")


@lora_app.command("list")
@with_options
def list_adapters(
    model: ServedModel,
    url: Url = SERVER_GRPC,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of the table.")] = False,
) -> None:
    """List the adapters: where each is, its rank, size, requests and folder. Example: quire lora list tinypy"""
    with _client(model, url) as client:
        adapters = client.loras(model)
    if as_json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(adapters), indent=2))
        return
    for info in adapters:
        print(printable(_line(info)))


def _line(info: "AdapterInfo") -> str:
    state = f"{info.state}{', pinned' if info.is_pinned else ''}"
    requests = f"{info.num_running} running, {info.num_waiting} waiting"
    return f"{info.name}  {state}  rank {info.rank}  {info.num_bytes / 1e6:.1f} MB  {requests}  {info.folder}"


@contextmanager
def _client(model: str, url: str) -> Iterator["Client"]:
    """Raises CommandError for what the client raises."""
    from quire_cli.models import check_packages, rejections

    check_packages()
    from quire_client import Client

    with rejections(f"{model}: "), Client(url) as client:
        yield client
