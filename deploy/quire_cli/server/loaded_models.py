"""LoadedModels: which models a server has that loads and unloads them while it runs, and which the next one must load.

There are two sources. The status pages of our own models are always up to date. The repository index lists all other
models too, is up to half a second old, and may be restricted. Neither says how a model was loaded: one that was loaded
with a configuration of the call's own is loaded again with that of the repository.
"""

import http.client
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire_backend.status_page import StubStatus
from quire_engine.system import process_state

from quire_cli.server.launch import ServerFlags

_ALL = "*"


@dataclass(frozen=True, slots=True)
class IndexedModel:
    """One version of a model, or a model without versions."""

    name: str
    version: str = ""
    state: str = ""
    """`READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`; empty when it was never loaded."""
    reason: str = ""
    """Why it is unavailable: `unloaded`, or why loading it failed."""


def ask_index(connection: http.client.HTTPConnection) -> list[IndexedModel] | None:
    """All models of the repository; None if the server rejects the call, as where that API is restricted.

    Raises:
        OSError, http.client.HTTPException: there is no answer.
    """
    connection.request("POST", "/v2/repository/index")
    answer = connection.getresponse().read()
    try:
        return [
            IndexedModel(*(" ".join(str(entry.get(key, "")).split()) for key in ("name", "version", "state", "reason")))
            for entry in json.loads(answer)
        ]
    except (ValueError, TypeError, AttributeError):
        return None


class LoadedModels:
    """The loaded models, over all servers of one run.

    Args:
        asked: models that the first server loads by name.
        follow_repository: whether a server loads whatever is in the repository, and unloads what no longer is.
        may_miss_some: whether the first server, too, may serve without a model that cannot be loaded.
    """

    def __init__(
        self, asked: Collection[str] = (), *, follow_repository: bool = False, may_miss_some: bool = False
    ) -> None:
        self._follow_repository = follow_repository
        self._may_miss_some = may_miss_some
        self.wanted = set(asked) - {_ALL}
        """What the next server must load: all models that were loaded and not unloaded since."""
        self.has_served = False
        """Whether a server of this run was ready."""
        self._has_unloaded = False
        self._knows_all = False
        self._ours: set[str] = set()
        self._seen: set[str] = set()
        self._missing: dict[str, str] = {}

    @property
    def may_miss_some(self) -> bool:
        """Whether a server may serve without a model that cannot be loaded, which is then reported as a problem."""
        return self._may_miss_some or self.has_served

    def start_again(self) -> None:
        """A server has died; the next one has loaded nothing yet."""
        self._seen.clear()
        self._missing.clear()

    def update(self, pages: Sequence[StubStatus], index: Sequence[IndexedModel] | None) -> None:
        """Note what a server that is ready has loaded.

        Args:
            pages: of the stubs that live, and of those that have just died.
            index: what the server said last, if anything.
        """
        self.has_served = True
        self._knows_all |= index is not None
        versions: dict[str, list[IndexedModel]] = {}
        for version in index or ():
            versions.setdefault(version.name, []).append(version)
        serves = self._look_at_pages(pages, versions)
        for name, serving in serves.items():
            self._note(name, serving)
        for name, found in versions.items():
            states = {version.state for version in found}
            if name in serves:
                continue
            if "READY" in states:
                # One of ours without a page has just been unloaded: the index is older than that.
                if name not in self._ours:
                    self._note(name, True)
            elif "UNLOADING" in states or any(version.reason == "unloaded" for version in found):
                self._note(name, False)
        for name in self.wanted - serves.keys() - versions.keys():
            if name in self._seen if index is None else self._follow_repository:
                self._note(name, False)
        self._missing = {
            name: _reason(versions.get(name, []))
            for name in self.wanted
            if serves.get(name, False) is False
            and not any(version.state == "READY" for version in versions.get(name, []))
            and (index is not None or name in self._ours)
        }

    @property
    def problems(self) -> list[str]:
        """The models that should be there and are not, in words."""
        return [f"model {name!r} is not loaded: {reason}" for name, reason in sorted(self._missing.items())]

    def flags(self, given: ServerFlags) -> ServerFlags:
        """What the next server is given in the place of the user's own flags."""
        if not self.has_served:
            return given
        flags = given
        names = given.all_values("load-model")
        # All of the repository remain all of it, unless one was unloaded that would come back.
        if given.values.get("model-control-mode") == "explicit" and (
            _ALL not in names or (self._has_unloaded and self._knows_all)
        ):
            flags = flags.without("load-model").plus(*(("load-model", name) for name in sorted(self.wanted)))
        # One model that can no longer be loaded must not keep the others away.
        return flags if "exit-on-error" in given.values else flags.plus(("exit-on-error", "false"))

    def _look_at_pages(
        self, pages: Sequence[StubStatus], versions: dict[str, list[IndexedModel]]
    ) -> dict[str, bool | None]:
        """Our models that have a stub → whether one of these serves; None where that has died."""
        stubs: dict[str, set[bool | None]] = {}
        for page in pages:
            is_unloaded = page.is_leaving or any(
                version.version == page.version and version.state == "UNLOADING"
                for version in versions.get(page.model, ())
            )
            serves = False if is_unloaded else process_state.is_alive(*page.stub) or None
            stubs.setdefault(page.model, set()).add(serves)
        self._ours |= stubs.keys()
        self._seen |= stubs.keys()
        return {name: True if True in found else None if None in found else False for name, found in stubs.items()}

    def _note(self, name: str, is_loaded: bool | None) -> None:
        if is_loaded:
            self.wanted.add(name)
        elif is_loaded is False and name in self.wanted:
            self.wanted.remove(name)
            self._has_unloaded = True


def _reason(versions: Sequence[IndexedModel]) -> str:
    if not versions:
        return "it is not in the repository, or the server does not tell of it"
    if any(version.state == "LOADING" for version in versions):
        return "it is being loaded"
    return next((version.reason for version in versions if version.reason), "the server's log says why")
