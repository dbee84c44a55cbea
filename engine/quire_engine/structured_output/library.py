"""The one place that imports xgrammar, without the libraries that it imports and that are not needed here.

xgrammar imports torch for the types of bitmasks and transformers for those of tokenizers. We give it numpy arrays, and
a tokenizer only where transformers is loaded already. So where one of the two is not loaded, something else stands in
for it while xgrammar is imported: the grammar compiler starts with 0.9 s of CPU time and 96 MB instead of 5 s and
436 MB, and an engine core has xgrammar after 0.4 s instead of 0.9 s. In a process that has loaded both, a user's with
`LLM` for one, this is an import like any other.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["xgrammar"]


class _Anything:
    """Stands for any class or function of a library that is not imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _StandIn(ModuleType):
    """Stands for a library that is not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    names = [name for name in ("torch", "transformers") if name not in sys.modules]
    if not names:
        yield
        return
    before = {name: sys.modules.get(name) for name in ("torch", "transformers")}
    if "torch" in names:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what xgrammar is built on knows to do without
        import tvm_ffi  # noqa: F401

        sys.modules["torch"] = _StandIn("torch")
    # Any other name of the real module would import torch.
    sys.modules["transformers"] = transformers = _StandIn("transformers")
    if (real := before["transformers"]) is not None:
        for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast"):
            setattr(transformers, name, getattr(real, name))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


with _stand_ins():
    import xgrammar
