"""`quire keys …`: keys of hosts, and of the OpenAI gateway's clients."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from quire_cli.errors import CommandError
from quire_cli.options import usage_errors, with_options

keys_app = typer.Typer(help="Keys: of hosts, and of the OpenAI gateway's clients.", rich_markup_mode=None)


@keys_app.command("host")
@with_options
def host(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where this host's keys are, or are to be.")],
    trust: Annotated[list[str] | None, ("KEY", "The public key of another host; may be repeated.")] = None,
) -> None:
    """Make the keys by which engines on several hosts know each other, and print this host's public key.

    The file (data_parallel_key_file) is for its owner alone to read, and stays on its host. The front's trusts the
    hosts whose engines may join; each of theirs trusts the front. What it holds already stays.
    """
    from quire_engine.ipc.keys import add_peers

    try:
        keys = add_peers(file, trust or ())
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from None
    print(keys.public_key.hex())
    print(f"quire: {file} trusts {len(keys.peers)} hosts; above is this one's public key", file=sys.stderr)


@keys_app.command("api")
@with_options
def api(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The client's name; the gateway's /metrics show it.")],
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: any number.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
) -> None:
    """Make a key for the OpenAI gateway: what a file of keys keeps goes to stdout, and the key to stderr.

    Example: quire keys api batch --requests-per-minute 60 >> keys; then quire serve --api-key-file keys
    """
    from quire_gateway.keys import make_key

    with usage_errors():
        key, kept = make_key(
            name, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute,
            max_concurrent=max_concurrent,
        )  # fmt: skip
    print(f"quire: the key of {name}, which is shown only now: {key}", file=sys.stderr)
    print(kept.line())
