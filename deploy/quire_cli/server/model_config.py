"""Checks each `config.pbtxt` before tritonserver does, which would only say that it "failed to read text proto"."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_engine.errors import did_you_mean
from quire_engine.system.extras import package_folder

from quire_cli.errors import CommandError

_NO_FIELD = re.compile(r'Message type "(?P<type>[^"]+)" has no field named "(?P<name>[^"]+)"')
_NO_VALUE = re.compile(r'Enum type "(?P<type>[^"]+)" has no value named (?P<name>\w+)')
_PLACE = re.compile(r"^\d+:\d+ : ")


def check_model_configs(repository: Path, tell: Callable[[str], None]) -> None:
    """Check that the `config.pbtxt` of every model can be parsed. Checks nothing if there is no tritonclient that works
    with the installed protobuf.

    Args:
        repository: the model repository.
        tell: gets a line about an unknown name, which a newer server may know.

    Raises:
        CommandError: one cannot be; it names the line and the field.
    """
    paths = sorted(repository.glob("*/config.pbtxt"))
    schema = _schema() if paths else None
    if schema is None:
        return
    for path in paths:
        if not path.is_file():
            raise CommandError(f"{path} is no regular file")
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from None
        _check(schema, path, text, tell)


def _check(schema: Any, path: Path, text: str, tell: Callable[[str], None], *, skips_new: bool = False) -> None:
    from google.protobuf import text_format

    try:
        text_format.Parse(text, schema.ModelConfig(), allow_unknown_field=skips_new)
    except text_format.ParseError as error:
        place = f"{path}, line {error.GetLine()}" if error.GetLine() else str(path)
        what, what_is_new = _explained(schema, str(error))
        if not what_is_new:
            raise CommandError(f"{place}: {what}") from None
        tell(f"{place}: {what}, as far as the installed tritonclient knows; a newer server may have it")
        if what_is_new == "field":  # behind it, there may be a slip; values cannot be skipped
            _check(schema, path, text, tell, skips_new=True)


def _schema() -> Any:
    """The module of `ModelConfig`; None if it cannot be imported.

    It is loaded by its file: importing it by name would import all of tritonclient and gRPC.
    """
    folder = package_folder("tritonclient")
    if folder is None:
        return None
    file = folder / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("quire_cli._model_config_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:  # there is no such file or no protobuf, or its version does not fit
        return None
    return module


def _explained(schema: Any, message: str) -> tuple[str, str]:
    """The parser's message without the place, and with the name that was probably meant; of what a newer server may
    know, whether it is a `field` or a `value`."""
    pool = schema.DESCRIPTOR.pool
    if found := _NO_FIELD.search(message):
        known = [field.name for field in pool.FindMessageTypeByName(found["type"]).fields]
        meant = did_you_mean(found["name"], known)
        return f"{found['type'].rpartition('.')[2]} has no field {found['name']!r}{meant}", "" if meant else "field"
    if found := _NO_VALUE.search(message):
        known = [value.name for value in pool.FindEnumTypeByName(found["type"]).values]
        meant = did_you_mean(found["name"], known)
        return f"{found['name']} is none of {', '.join(known)}{meant}", "" if meant else "value"
    return " ".join(_PLACE.sub("", message).split()).rstrip("."), ""
