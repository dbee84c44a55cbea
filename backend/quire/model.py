"""What tritonserver loads for `backend: "quire"`. Everything is in the installed package `quire_backend`."""

from quire_backend.completion import TritonPythonModel

__all__ = ["TritonPythonModel"]
