"""Each `config.pbtxt`, read before tritonserver does, which would only say that it "failed to read text proto"."""

import importlib.util
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire_cli.errors import CommandError

__all__ = ["check_model_configs"]

_NO_FIELD = re.compile(r'Message type "(?P<type>[^"]+)" has no field named "(?P<name>[^"]+)"')
_NO_VALUE = re.compile(r'Enum type "(?P<type>[^"]+)" has no value named (?P<name>\w+)')
_PLACE = re.compile(r"^\d+:\d+ : ")


def check_model_configs(repository: Path) -> None:
    """Check that the `config.pbtxt` of every model can be read. Where tritonclient is not installed nothing is checked.

    Raises:
        CommandError: one cannot; it names the line and the field.
    """
    paths = sorted(repository.glob("*/config.pbtxt"))
    schema = _schema() if paths else None
    if schema is None:
        return
    from google.protobuf import text_format

    for path in paths:
        if not path.is_file():
            raise CommandError(f"{path} is no regular file")
        try:
            text_format.Parse(path.read_text(encoding="utf-8", errors="replace"), schema.ModelConfig())
        except text_format.ParseError as error:
            place = f"{path}, line {error.GetLine()}" if error.GetLine() else str(path)
            raise CommandError(f"{place}: {_explained(schema, str(error))}") from None
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from None


def _schema() -> Any:
    """The module of `ModelConfig`; None where there is none.

    By its file: importing it by its name would import all of tritonclient and gRPC with it.
    """
    package = importlib.util.find_spec("tritonclient")
    for location in (package.submodule_search_locations or []) if package else []:
        file = Path(location) / "grpc" / "model_config_pb2.py"
        spec = importlib.util.spec_from_file_location("quire_cli._model_config_pb2", file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def _explained(schema: Any, message: str) -> str:
    """The parser's message without the place, and with the name that was probably meant."""
    pool = schema.DESCRIPTOR.pool
    if found := _NO_FIELD.search(message):
        known = [field.name for field in pool.FindMessageTypeByName(found["type"]).fields]
        return f"{_last(found['type'])} has no field {found['name']!r}{_meant(found['name'], known)}"
    if found := _NO_VALUE.search(message):
        known = [value.name for value in pool.FindEnumTypeByName(found["type"]).values]
        return f"{found['name']} is none of {', '.join(known)}{_meant(found['name'], known)}"
    return " ".join(_PLACE.sub("", message).split()).rstrip(".")


def _meant(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]
