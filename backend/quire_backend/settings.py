"""`1/model.json` → EngineConfig, with one clear line for whatever is wrong with it."""

import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from quire_engine.config import EngineConfig

__all__ = ["load_engine_config", "one_line"]

SETTINGS_FILE = "model.json"
TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
"""Environment variable that stands for the setting `introspection_token`, so that no secret has to be in a file."""
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable; it stands for the setting `otlp_endpoint`."""

logger = logging.getLogger(__name__)


def load_engine_config(version_dir: Path) -> EngineConfig:
    """Read the settings in a model's version folder.

    Raises:
        ValueError: the file is missing, not a JSON object, or holds an unknown name or a bad value.
    """
    path = version_dir / SETTINGS_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f'{path} is missing; it must hold the engine\'s settings, at least {{"model": "folder"}}'
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a JSON object of settings, not a {type(settings).__name__}")
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        settings.setdefault("introspection_token", token)
    endpoint = os.environ.get(OTLP_VARIABLE)
    if endpoint and "otlp_endpoint" not in settings:
        if _has_otel():
            settings["otlp_endpoint"] = endpoint
        else:  # it may be meant for other programs: no reason not to serve
            logger.warning("%s is set, but the extra otel is not installed: nothing is exported", OTLP_VARIABLE)
    try:
        return EngineConfig.from_settings(settings, base_dir=version_dir)
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from None


def _has_otel() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks; its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
