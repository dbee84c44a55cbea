"""What tritonserver loads for `backend: "quire"`. Everything is in the installed package `quire_backend`."""

from quire_backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
