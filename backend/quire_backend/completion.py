"""TritonPythonModel as tritonserver loads it, and the completion of a model's configuration.

tritonserver starts two stubs for a model. The first completes the configuration and ends; it imports this file alone.
The second serves: its instance is one of `model.TritonPythonModel`, with the engine's client and the metrics.
"""

import json
from typing import Any

from quire_engine.errors import EngineError
from quire_engine.models.served import read_checkpoint
from quire_engine.pooling import NO_POOLING_INFO, PoolingInfo
from quire_engine.tasks.reading import read_pooling_info

from quire_backend import model_config, triton_api
from quire_backend.settings import SETTINGS_FILE


class TritonPythonModel:
    """The class whose instance a stub makes."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Complete `config.pbtxt`, which only needs `backend: "quire"`, by what the model can do."""
        model_config.complete(auto_complete_model_config, offered_tasks())
        return auto_complete_model_config

    def __new__(cls) -> Any:
        """The model that serves."""
        from quire_backend.model import TritonPythonModel

        return TritonPythonModel()


def offered_tasks() -> PoolingInfo | None:
    """What the model's checkpoint offers besides generation; None if there is no `model.json`. A checkpoint that is
    not here yet, or cannot be read, counts as one that offers what most do: the engine then says what is wrong.
    """
    try:
        folder = triton_api.model_folder()
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (AttributeError, OSError, ValueError):
        return None
    try:
        checkpoint = folder / settings["model"]
        return read_pooling_info(checkpoint, read_checkpoint(checkpoint, settings.get("model_impl", "auto")))
    except (EngineError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return NO_POOLING_INFO
