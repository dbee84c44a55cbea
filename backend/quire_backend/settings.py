"""`1/model.json` → EngineConfig; whatever is wrong with it is reported in one line."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire_engine.config import EngineConfig

SETTINGS_FILE = "model.json"
ADAPTERS_FILE = "multi_lora.json"
"""vllm_backend's file beside it: names of LoRA adapters and their folders."""
TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
"""Environment variable for the setting `introspection_token`, so that the secret need not be in a file."""
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's variable; it sets `otlp_endpoint`."""

logger = logging.getLogger(__name__)


def load_engine_config(version_dir: Path, instance_kind: str = "MODEL", instance_device_id: int = 0) -> EngineConfig:
    """Read the settings in a model's version folder.

    Args:
        version_dir: the folder.
        instance_kind: of the model's instance group: `CPU`, `GPU` or `MODEL`. The first two determine where the model
            is computed; with the last, the settings do.
        instance_device_id: the GPU of an instance of kind `GPU`.

    Raises:
        ValueError: the file is missing, not a JSON object, or holds an unknown name or a bad value, or one that does
            not go with the instance's kind.
    """
    path = version_dir / SETTINGS_FILE
    settings = _read_object(path, "settings")
    if settings is None:
        raise ValueError(f'{path} is missing; it must hold the engine\'s settings, at least {{"model": "folder"}}')
    if str(eager := settings.get("enforce_eager")).lower() in ("true", "false"):  # text in vllm_backend's tutorial
        settings["enforce_eager"] = str(eager).lower() == "true"
    if str(settings.get("enable_lora")).lower() == "true":
        settings |= _adapters(version_dir / ADAPTERS_FILE, settings)
    token = os.environ.get(TOKEN_VARIABLE)
    is_given_outside = bool(token) and "introspection_token" not in settings
    if is_given_outside:
        settings["introspection_token"] = token
    endpoint = os.environ.get(OTLP_VARIABLE)
    if endpoint and "otlp_endpoint" not in settings:
        if _has_otel():
            settings["otlp_endpoint"] = endpoint
        else:  # it may be meant for other programs, and is no reason to refuse to serve
            logger.warning("%s is set, but the extra otel is not installed: nothing is exported", OTLP_VARIABLE)
    try:
        settings |= _device_settings(settings, instance_kind, instance_device_id)
        return EngineConfig.from_settings(settings, base_dir=version_dir)
    except ValueError as error:
        is_outside = is_given_outside and str(error).startswith("introspection_token ")
        raise ValueError(f"{TOKEN_VARIABLE if is_outside else path}: {one_line(error)}") from None


def _read_object(path: Path, what: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file. Raises ValueError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object of {what}, not a {type(values).__name__}")
    return values


def _adapters(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The setting `lora_modules` with what a file of adapters says. Raises ValueError."""
    said, own = _read_object(path, "adapters' names and their folders"), settings.get("lora_modules")
    if not said:
        return {}
    for name, folder in said.items():
        if not isinstance(folder, str) or not folder:
            raise ValueError(f"{path} has {folder!r} for {name!r}; it must be the adapter's folder")
        if isinstance(own, dict) and own.get(name, folder) != folder:
            raise ValueError(f"{path} has {folder!r} for {name!r}, and lora_modules {own[name]!r}; they must agree")
    return {"lora_modules": {**said, **own} if isinstance(own, dict) else own or said}


def name_of_settings(config: EngineConfig) -> str:
    """A short name that other settings do not share, for a metric that shows when they have changed.

    It is made of what the configuration shows of itself, which is all but the token.
    """
    return hashlib.sha256(repr(config).encode()).hexdigest()[:8]


def _device_settings(settings: Mapping[str, Any], kind: str, device_id: int) -> dict[str, Any]:
    """The settings of devices that follow from the instance's kind.

    Raises:
        ValueError: `model.json` contradicts them.
    """
    if kind == "GPU":
        kind_means = f"KIND_GPU, which is one GPU ({device_id})"
        asked = {"device": "cuda", "gpu_device_ids": [device_id]}
        allowed: dict[str, tuple[Any, ...]] = {
            "device": ("auto", "cuda"),
            "gpu_device_ids": (None, [device_id]),
            "data_parallel_size": (1,),
            "data_parallel_max_size": (None, 1),
            "disaggregation": (None,),
            "tensor_parallel_size": (1,),
            "pipeline_parallel_size": (1,),
            "distributed_executor_backend": (None, "uni", "mp"),
        }
    elif kind == "CPU":
        kind_means = "KIND_CPU (as it is without an instance_group, where the server finds no GPU)"
        asked = {"device": "cpu"}
        allowed = {"device": ("auto", "cpu"), "gpu_device_ids": (None,)}
    else:
        return {}
    for name, values in allowed.items():
        if name in settings and settings[name] not in values:
            raise ValueError(
                f"{name} is {settings[name]!r}, but config.pbtxt has an instance of {kind_means}; please specify "
                "KIND_MODEL, instance_group [ { count: 1 kind: KIND_MODEL } ], which leaves the devices to this file"
            )
    return asked


def _has_otel() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
