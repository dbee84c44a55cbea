"""Mixed streams without end, each answer compared with what the same server gave before anything happened to it.

A request may end in one of two ways: with exactly the text and tokens of the undisturbed run, or, while something was
done to it that its client cannot be spared (`excused`), with an error, after a beginning of that text. Everything else
is kept in `failures`: an error without an excuse, another text, or no end at all.
"""

import asyncio
import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from support.clients import Answer, ask, ask_all
from support.serving import Server
from tritonclient.grpc import aio as grpc_aio
from tritonclient.utils import InferenceServerException

__all__ = ["Streams"]

NUM_STREAMS = 10
LONGEST_ANSWER_SECONDS = 150.0
"""A request that takes longer is lost. A server that hangs is given up only after some time, and started again."""
PAUSE_AFTER_ERROR_SECONDS = 0.1

_STREAM: dict[str, Any] = {"stream": True, "exclude_input_in_output": True, "return_finish_reason": True}
_TOKENS: dict[str, Any] = {**_STREAM, "return_token_ids": True}
_SHARED = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n"


def _kinds(number: int) -> list[dict[str, Any]]:
    """One request of each kind."""
    prompt = f"def f{number}(x):\n    "
    length = {"max_tokens": 40 + 5 * number % 60, "ignore_eos": True, "seed": number}
    regex = {"regex": rf"(yes|no|maybe){{{1 + number % 3}}} [0-9]{{12,20}}"}
    return [
        {"text_input": prompt, **_TOKENS, **length, "temperature": 0.0},
        {"text_input": prompt, **_TOKENS, **length, "temperature": 0.9, "top_p": 0.9},
        {"text_input": _SHARED * (2 + number % 6) + prompt, **_TOKENS, **length, "temperature": 0.7},
        {"text_input": prompt, **_TOKENS, **length, "stream": False, "temperature": 0.8},
        {"text_input": prompt, **_STREAM, **length, "temperature": 0.8, "n": 2},
        {"text_input": prompt, **_TOKENS, **length, "temperature": 1.0, "logprobs": 3, "return_logprobs": True},
        {"text_input": prompt, **_TOKENS, **length, "temperature": 0.6, "repetition_penalty": 1.3},
        {"text_input": "answer: ", **_TOKENS, "max_tokens": 40, "seed": number, "structured_outputs": regex},
        {"text_input": prompt, **_TOKENS, "max_tokens": 60, "seed": number, "stop_words": ["\n\n", "return"]},
    ]


@dataclass(frozen=True, slots=True)
class Said:
    """What a client was told in answer to a request."""

    texts: tuple[str, ...]
    """One per sequence."""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""

    def begins(self, other: "Said") -> bool:
        """Whether this is how `other` begins."""
        texts = itertools.zip_longest(self.texts, other.texts, fillvalue="")
        return (
            all(whole.startswith(text) for text, whole in texts)
            and other.token_ids[: len(self.token_ids)] == self.token_ids
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what has to come of it."""

    request: dict[str, Any]
    over_http: bool
    answer: Said

    def __str__(self) -> str:
        return f"{'HTTP' if self.over_http else 'gRPC'} {self.request}"


@dataclass(slots=True)
class _Excuse:
    model: str | None
    began: float
    ended: float | None = None

    def covers(self, model: str, began: float) -> bool:
        """Whether a request that began then and has just ended was there at the time."""
        return self.model in (None, model) and (self.ended is None or self.ended >= began)


class Streams:
    """Requests of all kinds from a thread of its own, `NUM_STREAMS` at a time.

    Args:
        server: where they go; it must be undisturbed until `start` returns.
        models: who computes them.
        seed: of the choice among them.
    """

    def __init__(self, server: Server, models: list[str], seed: int) -> None:
        self._server, self._seed = server, seed
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._excuses: list[_Excuse] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams")
        requests = [
            {"model": model, **request} for number in range(3) for request in _kinds(number) for model in models
        ]
        answers = [_said(answer) for answer in ask_all(server, requests)]
        self._wanted = [Wanted(one, False, said) for one, said in zip(requests, answers, strict=True)]
        # generate_stream takes one value of each output only, so those of several sequences stay out.
        self._wanted += [Wanted(one.request, True, one.answer) for one in self._wanted if "n" not in one.request]

    def start(self) -> None:
        """Send from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more, and wait until all is answered."""
        self._stopping.set()
        self._thread.join()

    @contextmanager
    def excused(self, model: str | None = None) -> Iterator[None]:
        """Requests of a model, or of any, that live at some time within the body may end with an error."""
        excuse = _Excuse(model, time.monotonic())
        self._excuses.append(excuse)
        try:
            yield
        finally:
            excuse.ended = time.monotonic()

    async def _run(self) -> None:
        await asyncio.gather(*(self._stream(Random(f"{self._seed}/{number}")) for number in range(NUM_STREAMS)))

    async def _stream(self, random: Random) -> None:
        while not self._stopping.is_set():
            # A channel that has lost its server waits longer and longer before it tries again; a new one does not.
            async with grpc_aio.InferenceServerClient(self._server.grpc) as client:
                while not self._stopping.is_set() and await self._one(client, random.choice(self._wanted)):
                    pass
            await asyncio.sleep(PAUSE_AFTER_ERROR_SECONDS)

    async def _one(self, client: grpc_aio.InferenceServerClient, wanted: Wanted) -> bool:
        """Send one and judge its answer; False when that was an error."""
        began = time.monotonic()
        sending = _ask_over_http(self._server, wanted.request) if wanted.over_http else ask(client, **wanted.request)
        try:
            answer = await asyncio.wait_for(sending, LONGEST_ANSWER_SECONDS)
        except asyncio.TimeoutError:
            self._fail(f"no end after {LONGEST_ANSWER_SECONDS:.0f} s", wanted, began)
            return False
        error, answer.error = answer.error, None
        self._judge(wanted, answer, error, began)
        return error is None

    def _judge(self, wanted: Wanted, answer: Answer, error: InferenceServerException | None, began: float) -> None:
        said = _said(answer)
        if error is None:
            if said == wanted.answer:
                self.counts["as undisturbed"] += 1
            else:
                self._fail(f"changed to {said}, was {wanted.answer}", wanted, began)
        elif not said.begins(wanted.answer):
            self._fail(f"changed before its error to {said}, was {wanted.answer}", wanted, began)
        elif any(excuse.covers(wanted.request["model"], began) for excuse in self._excuses):
            self.counts["ended with an excused error"] += 1
        else:
            self._fail(f"lost: {error}", wanted, began)

    def _fail(self, what: str, wanted: Wanted, began: float) -> None:
        self.counts["failed"] += 1
        self.failures.append(f"{what}; after {time.monotonic() - began:.1f} s: {wanted}")


def _said(answer: Answer) -> Said:
    assert answer.error is None, answer.error
    rows = [response["text_output"] for response in answer.responses if "text_output" in response]
    texts = tuple("".join(texts) for texts in itertools.zip_longest(*rows, fillvalue=""))
    last = answer.responses[-1] if answer.responses else {}
    return Said(
        texts=texts,
        token_ids=tuple(token_id for response in answer.responses for token_id in response.get("token_ids", ())),
        # Of several sequences the last response tells only of those that end with it.
        finish_reason=str(last.get("finish_reason", [""])[0]) if len(texts) == 1 else "",
    )


async def _ask_over_http(server: Server, request: dict[str, Any]) -> Answer:
    """The same request as `generate` or `generate_stream`, in a thread of its own."""
    return await asyncio.to_thread(_generate, server, request)


def _generate(server: Server, request: dict[str, Any]) -> Answer:
    body = {name: value for name, value in request.items() if name != "model"}
    structure = body.get("structured_outputs")
    if structure is not None:
        body["structured_outputs"] = json.dumps(structure)
    call = "generate_stream" if body["stream"] else "generate"
    answer = Answer()
    host, _, port = server.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LONGEST_ANSWER_SECONDS)
    try:
        connection.request("POST", f"/v2/models/{request['model']}/{call}", json.dumps(body))
        with connection.getresponse() as response:
            for line in response:
                if line.strip():
                    _take(answer, json.loads(line.removeprefix(b"data: ")))
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = InferenceServerException(f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    if answer.error is None and _said(answer).finish_reason in ("", "None"):
        answer.error = InferenceServerException("the connection was closed before the answer's end")
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = InferenceServerException(event["error"])
    else:
        lists = {name: value if isinstance(value, list) else [value] for name, value in event.items()}
        answer.responses.append(lists)
