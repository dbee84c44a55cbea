"""One client that sends the worst that the limits allow, from a line on stdin to its end. It says when it is ready.

    python tests/support/hostile.py HTTP OPENAI [KIND …]

A process of its own at the lowest priority, as it would be on another machine: what it costs to build such requests is
no part of the measurement. At the end it prints as JSON how many requests of each kind were answered,
by status.
"""

import http.client
import json
import os
import random
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable

__all__ = ["KINDS", "kinds"]

MODEL = "tinypy"
_DEADLINE_S = 120.0
_BODY_BYTES = 15 << 20  # of the 16 MiB that the gateway takes
KINDS = (
    "large answers", "large answers streamed", "large answers at once",
    "chats of many messages", "a chat of many parts", "a long chat",
    "spaces", "spaces over OpenAI", "slow expressions", "large schemas", "deep JSON", "many numbers", "many prompts",
    "long parameters", "abandoned", "slow readers",
)  # fmt: skip

Attack = Callable[[], object]


def kinds(triton: str, openai: str) -> dict[str, list[Attack]]:
    """Each kind's attacks, one thread each: called again and again, they return a status."""
    generate, stream = f"/v2/models/{MODEL}/generate", f"/v2/models/{MODEL}/generate_stream"
    chat, complete = "/v1/chat/completions", "/v1/completions"

    def posts(address: str, path: str, body: object) -> Attack:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return lambda: _post(address, path, data)

    def grammar(address: str, **structure: object) -> Attack:
        """Each time another one, so that no cache knows it."""

        def attack() -> object:
            named = {"prompt": "x", "model": MODEL, "max_tokens": 8, "user": str(random.random())}
            text = json.dumps({**named, "structured_outputs": structure}).replace("RANDOM", str(random.random())[2:])
            return _post(address, complete, text.encode())

        return attack

    answer = {
        "text_input": "x",
        "n": 128,
        "logprobs": 20,
        "max_tokens": 390,
        "ignore_eos": True,
        "return_logprobs": True,
    }
    said = {"model": MODEL, "max_tokens": 1}
    message = {"role": "user", "content": "x"}
    many = {**said, "messages": [message] * (_BODY_BYTES // 40)}
    parts = {**said, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (_BODY_BYTES // 34)}]}
    properties = {f"RANDOM{i}": {"type": "string", "enum": [f"RANDOM{j}" for j in range(20)]} for i in range(400)}
    return {
        "large answers": [posts(triton, generate, answer)] * 2,
        "large answers streamed": [posts(triton, stream, {**answer, "stream": True})],
        "large answers at once": [
            posts(
                triton,
                generate,
                {"input_ids": [7] * 900, "prompt_logprobs": 20, "return_prompt_logprobs": True, "max_tokens": 1},
            )
        ]
        * 2,
        "chats of many messages": [
            posts(openai, chat, many),
            posts(openai, chat, {**many, "messages": many["messages"][:80_000]}),  # not too many to be read
            *[posts(triton, generate, {"messages": json.dumps(many["messages"])})] * 2,
        ],
        "a chat of many parts": [posts(openai, chat, parts)],
        "a long chat": [
            posts(openai, chat, {**said, "messages": [{**message, "content": "word " * (_BODY_BYTES // 5)}]})
        ],
        "spaces": [posts(triton, generate, {"text_input": " " * 10_000_000 + "x", "max_tokens": 1})],
        "spaces over OpenAI": [posts(openai, complete, {**said, "prompt": " " * 10_000_000 + "x"})],
        "slow expressions": [grammar(openai, regex="(a|RANDOM|(b{1,60}c{1,60}){1,60}){1,60}")],
        "large schemas": [grammar(openai, json={"type": "object", "properties": properties})],
        "deep JSON": [
            posts(openai, chat, b"[" * _BODY_BYTES),
            posts(triton, generate, {"text_input": "x", "sampling_parameters": "[" * 1_000_000}),
            posts(triton, generate, {"messages": '[{"a":' * (_BODY_BYTES // 6)}),
        ],
        "many numbers": [
            posts(openai, complete, {**said, "prompt": [0] * (_BODY_BYTES // 3)}),
            posts(triton, generate, {"messages": "[" + "0," * (_BODY_BYTES // 2) + "0]"}),
        ],
        "many prompts": [posts(openai, complete, {**said, "prompt": ["x"] * 100_000})],
        "long parameters": [
            posts(triton, generate, {"text_input": "x", "sampling_parameters": json.dumps({"stop": ["x"] * 500_000})})
        ],
        "abandoned": [lambda: _abandon(triton, stream)],
        "slow readers": [lambda: _read_slowly(triton, stream)],
    }


def _post(address: str, path: str, body: bytes) -> object:
    connection = http.client.HTTPConnection(address, timeout=_DEADLINE_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while answer.read(1 << 20):
            pass
        return answer.status
    finally:
        connection.close()


def _open(address: str, path: str, max_tokens: int) -> socket.socket:
    wanted = {"text_input": "x", "logprobs": 20, "return_logprobs": True, "max_tokens": max_tokens, "ignore_eos": True}
    body = json.dumps({**wanted, "stream": True}).encode()
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=_DEADLINE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def _abandon(address: str, path: str) -> object:
    with _open(address, path, 900) as connection:
        connection.recv(64)
    return "left"


def _read_slowly(address: str, path: str) -> object:
    with _open(address, path, 100) as connection:
        while not _IS_OVER.wait(0.05) and connection.recv(512):
            pass
    return "read"


_IS_OVER = threading.Event()


def main(triton: str, openai: str, *only: str) -> None:
    """Attack until stdin ends, with all kinds or only some."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)

    def go_on(kind: str, attack: Attack) -> None:
        while not _IS_OVER.is_set():
            try:
                outcome = str(attack())
            except (OSError, http.client.HTTPException) as error:
                outcome = type(error).__name__
            outcomes[kind][outcome] += 1
            _IS_OVER.wait(0.01)  # a closed port is not asked a thousand times a second

    attacks = {kind: several for kind, several in kinds(triton, openai).items() if not only or kind in only}
    os.nice(19)
    print("ready", flush=True)
    sys.stdin.readline()
    for kind, several in attacks.items():
        for attack in several:
            threading.Thread(target=go_on, args=(kind, attack), daemon=True).start()
    sys.stdin.read()
    _IS_OVER.set()
    print(json.dumps({kind: dict(outcomes[kind]) for kind in attacks}), flush=True)
    os._exit(0)  # whatever is still open


if __name__ == "__main__":
    main(*sys.argv[1:])
