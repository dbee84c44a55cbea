"""A stand-in for a tritonserver that serves Quire: /metrics over HTTP, and as much gRPC as the dashboard speaks.

Both are real servers on loopback, so that what is tested is what goes over the wire. What they answer is in `State`,
which a test changes as it likes.
"""

import base64
import json
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

__all__ = ["MODEL", "TOKEN", "FakeTriton", "State", "fake_triton", "make_request"]

MODEL = "tinypy"
TOKEN = "the token of the tests"
_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BY_CLASS = ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds")
_HISTOGRAMS = (
    "inter_token_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_prompt_tokens", "iteration_tokens",
)  # fmt: skip
Labels = tuple[tuple[str, str], ...]


class State:
    """What the server would say."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        self.observations: dict[tuple[str, Labels], list[float]] = {}
        self.snapshot: dict[str, Any] = make_snapshot()
        self.ended: dict[str, Any] = make_ended()
        self.cursors: list[str] = []
        """That askers for ended requests have shown."""
        self.cancelled: list[str] = []
        self.prompts: list[tuple[str, dict[str, Any]]] = []
        self.images: list[list[bytes]] = []
        """Files of each prompt."""
        self.words = ["def ", "fib", "(n):", "\n    return n"]
        self.chat_format: dict[str, Any] = {"has_chat_template": False}
        self.health: dict[str, Any] = {"healthy": True}
        self.stalls = False
        """Whether a stream stops after its first word, until its client cancels it."""
        self.num_replicas = 1
        self.operations: list[dict[str, Any]] = []
        """What an operator has asked for, with its parameters."""
        self.num_remote_replicas: int | None = None
        self.adapters: dict[str, dict[str, Any]] = {}
        """Name → what is said of it."""
        self.num_readings = 0
        """Of /metrics."""
        self.traffic = self.misses = 0
        """Requests that end between two readings of /metrics: good ones, and ones of the class `batch` that are not."""
        self.lingers_s = 0.0
        """How long a stream stays open after its last response."""
        self.were_cancelled: list[bool] = []
        """Of each stream, whether its client had cancelled it when it ended."""
        for name, value in (("engine_up", 1), ("kv_cache_usage_ratio", 0.25), ("requests_running", 2)):
            self.set(name, value)
        for name in ("generation_tokens_total", "prompt_tokens_total", "prompt_tokens_cached_total",
                     "preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
                     "engine_restarts_total", "requests_replayed_total", "kv_block_evictions_total"):  # fmt: skip
            self.set(name, 0)
        for reason in ("queue", "grammar", "remote_kv"):
            self.set("requests_waiting", 0, reason=reason)
        for state, blocks in (("used", 8), ("cached", 16), ("free", 40)):
            self.set("kv_blocks", blocks, state=state)
        self.set("worker_up", 1, rank="0")
        self.set("server_start_time_seconds", time.time() - 600)
        self.set("model_load_timestamp_seconds", time.time() - 590, settings="aaaa0000")
        for outcome in ("stop", "length", "abort", "error", "rejected"):
            self.set("requests_total", 0, outcome=outcome)
        for slo in ("default", "batch"):
            self.set("slo_requests_total", 0, slo=slo, verdict="good", cause="none")
            for cause in ("ttft", "tpot", "e2e", "rejected", "error"):
                self.set("slo_requests_total", 0, slo=slo, verdict="miss", cause=cause)
            self.set("slo_objective_ratio", 0.99, slo=slo)
            for name in _BY_CLASS:
                self.observations[name, (("slo", slo),)] = []
        for slo, target, seconds in (
            ("default", "ttft", 0.5), ("default", "tpot", 0.05), ("default", "e2e", 10.0), ("batch", "e2e", 60.0),
        ):  # fmt: skip
            self.set("slo_target_seconds", seconds, slo=slo, target=target)
        for name in _HISTOGRAMS:
            self.observations[name, ()] = []
        for phase in ("schedule", "execute", "update"):
            self.observations["step_seconds", (("phase", phase),)] = []

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a series; `name` without `quire_`."""
        with self.lock:
            self.samples[name][tuple(sorted(labels.items()))] = value

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add to a series."""
        with self.lock:
            self.samples[name][tuple(sorted(labels.items()))] += value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        with self.lock:
            self.observations[name, tuple(sorted(labels.items()))].append(value)

    def finish(self, number: int, *, slo: str = "default", cause: str = "none", ttft: float = 0.04) -> None:
        """Some requests have ended; a cause other than `none` is a miss."""
        with self.lock:
            verdict = "good" if cause == "none" else "miss"
            self.add("slo_requests_total", number, slo=slo, verdict=verdict, cause=cause)
            self.add("requests_total", number, outcome="rejected" if cause == "rejected" else "length")
            self.add("generation_tokens_total", 32 * number)
            self.add("prompt_tokens_total", 100 * number)
            self.add("prompt_tokens_cached_total", 40 * number)
            self.add("prefix_cache_queries_total", 100 * number)
            self.add("prefix_cache_hits_total", 40 * number)
            for _ in range(number):
                self.observe("time_to_first_token_seconds", ttft, slo=slo)
                self.observe("request_prefill_time_seconds", 0.8 * ttft)
                self.observe("request_queue_time_seconds", 0.1 * ttft)
                self.observe("time_per_output_token_seconds", 0.02, slo=slo)
                self.observe("inter_token_latency_seconds", 0.02)
                self.observe("e2e_request_latency_seconds", ttft + 0.7, slo=slo)
                self.observe("request_prompt_tokens", 100)
                self.observe("iteration_tokens", 8)
                for phase, seconds in (("schedule", 0.001), ("execute", 0.02), ("update", 0.001)):
                    self.observe("step_seconds", seconds, phase=phase)

    def ended_since(self, cursor: str) -> dict[str, Any]:
        """The answer to who has seen all until `cursor`."""
        with self.lock:
            self.cursors.append(cursor)
            ring, _, seen = cursor.partition(":")
            name = self.ended["ring"]
            first = int(seen) if ring == name else 0
            answer = {key: value for key, value in self.ended.items() if key != "ring"}
            fresh = [one for one in self.ended["requests"] if one["number"] >= first]
            return {**answer, "cursor": f"{name}:{self.ended['num_ended']}", "requests": fresh}

    def end(self, **values: Any) -> None:
        """A request has ended."""
        with self.lock:
            number = self.ended["num_ended"]
            self.ended["requests"].append(make_ended_request(number, **values))
            self.ended["num_ended"] += 1

    def metrics_text(self) -> str:
        """/metrics, with the series of tritonserver's own among them."""
        with self.lock:
            self.num_readings += 1
            if self.traffic:
                self.finish(self.traffic)
            if self.misses:
                self.finish(self.misses, slo="batch", cause="e2e")
            base: Labels = (("engine", "0"), ("model", MODEL), ("version", "1"))
            lines = ["# HELP nv_inference_count Number", "# TYPE nv_inference_count counter",
                     'nv_inference_count{model="tinypy",version="1"} 7']  # fmt: skip
            for name, series in self.samples.items():
                lines.append(f"# HELP quire_{name} What it is")
                lines.append(f"# TYPE quire_{name} {'counter' if name.endswith('_total') else 'gauge'}")
                lines += [f"quire_{name}{_braces(base + own)} {value}" for own, value in series.items()]
            typed = set()
            for (name, own), values in self.observations.items():
                if name not in typed:
                    typed.add(name)
                    lines += [f"# HELP quire_{name} What it is", f"# TYPE quire_{name} histogram"]
                labels = base + own
                lines.append(f"quire_{name}_count{_braces(labels)} {len(values)}")
                lines.append(f"quire_{name}_sum{_braces(labels)} {sum(values)}")
                for bound in (*_BOUNDS, float("inf")):
                    le = "+Inf" if bound == float("inf") else str(bound)
                    below = sum(value <= bound for value in values)
                    lines.append(f"quire_{name}_bucket{_braces((*labels, ('le', le)))} {below}")
            return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    """What comes later wins, so that a series can be of another model."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in dict(labels).items()) + "}"


def make_request(id_: str, **values: Any) -> dict[str, Any]:
    """A request of a snapshot, in decode after a preemption."""
    return {
        "id": id_, "label": "", "phase": "decode", "age_seconds": 5.0, "queue_seconds": 1.0, "num_prompt_tokens": 100,
        "num_computed_tokens": 110, "num_cached_tokens": 32, "num_output_tokens": 10, "max_tokens": 40, "num_blocks": 4,
        "num_preemptions": 1, "priority": 0, "slo_class": "default", "slo_slack_seconds": 2.5,
        "start_slack_seconds": None, "predicted_start_seconds": None,
        "events": [
            {"kind": "arrived", "age_seconds": 5.0, "num_tokens": 0},
            {"kind": "scheduled", "age_seconds": 4.0, "num_tokens": 0},
            {"kind": "prefill_chunk", "age_seconds": 4.0, "num_tokens": 64},
            {"kind": "prefill_chunk", "age_seconds": 3.5, "num_tokens": 36},
            {"kind": "first_token", "age_seconds": 3.0, "num_tokens": 1},
            {"kind": "preempted", "age_seconds": 2.0, "num_tokens": 0},
            {"kind": "scheduled", "age_seconds": 1.0, "num_tokens": 0},
        ],
        "phases": [["queue", 5.0], ["prefill", 4.0], ["decode", 3.0], ["preempted", 2.0], ["decode", 1.0]],
        **values,
    }  # fmt: skip


def make_snapshot() -> dict[str, Any]:
    """Two requests that hold four blocks each, 16 cached ones, and 40 free ones."""
    requests = [
        make_request("aaaa1111bbbb2222", label="report"),
        make_request("cccc3333dddd4444", label="chat", slo_class="batch", phase="prefill", num_output_tokens=0),
    ]
    owner = [0] * 4 + [1] * 4 + [-1] * 56
    return {
        "model": MODEL, "version": "1", "time_unix": time.time(),
        "settings": {"slo": {"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}, "batch": {"e2e_ms": 60000}}},
        "engine": {
            "up": True, "pid": 4242, "restarts": 0, "step": 1234, "batches_in_flight": 1, "max_num_seqs": 16,
            "max_num_batched_tokens": 512, "step_seconds": {"schedule": 0.001, "execute": 0.02, "update": 0.001},
            "last_step": {"num_requests": 2, "num_tokens": 65, "num_prefill_tokens": 64, "num_decode_tokens": 1},
            "ranks": [{"rank": 0, "pid": 4243, "up": True, "step_seconds_p50": 0.021}],
            "queues": {"to_engine": 3, "responses": 5},
        },
        "requests": requests,
        "blocks": {"block_size": 16, "num_blocks": 64, "owner": owner, "ref_count": [2, 2] + [1] * 6 + [0] * 56,
                   "cached": [1] * 24 + [0] * 40},
        "prefix_tree": {"num_cached_blocks": 24, "num_roots": 3, "depth": 7,
                        "hottest": [{"num_blocks": 4, "num_references": 9}]},
    }  # fmt: skip


def make_ended_request(number: int, **values: Any) -> dict[str, Any]:
    """One that waited for most of its time, and missed its target for that."""
    return {
        "number": number, "time_unix": time.time() - 60 + number, "finish_reason": "length", "id": f"{number:016x}",
        "label": f"request-{number}", "slo_class": "default", "slo_verdict": "miss", "slo_cause": "ttft",
        "e2e_seconds": 5.4, "queue_seconds": 4.1, "time_to_first_token_seconds": 4.4, "prefill_seconds": 0.3,
        "decode_seconds": 1.0, "time_per_output_token_seconds": 0.02, "num_prompt_tokens": 100, "num_output_tokens": 51,
        "num_running_before": 16, "num_waiting_before": 3, "parameters": {"max_tokens": 51, "temperature": 0.5},
        **values,
    }  # fmt: skip


def make_ended() -> dict[str, Any]:
    """Nothing has ended."""
    slo = {"default": {"ttft": 0.5, "tpot": 0.05, "e2e": 10.0}, "batch": {"e2e": 60.0}}
    return {
        "ring": "aaaa0000", "num_ended": 0, "capacity": 2000, "since_unix": time.time() - 600, "slo": slo,
        "requests": [],
    }  # fmt: skip


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, state: State) -> None:
        self._state = state

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=MODEL, version="1", state="READY")
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        try:
            for request in requests:
                yield from self._answer(request, context)
        finally:  # gRPC closes the stream of a client that has gone
            time.sleep(self._state.lingers_s)
            self._state.were_cancelled.append(not context.is_active())

    def _answer(self, request: Any, context: Any) -> Iterator[Any]:
        parameters = {name: getattr(value, value.WhichOneof("parameter_choice"))
                      for name, value in request.parameters.items()}  # fmt: skip
        state = self._state
        open_answers = {"chat_format": state.chat_format, "health": state.health}  # need no token, and take none
        if parameters.keys() == {"introspect"} and parameters["introspect"] in open_answers:
            yield _response({"text_output": json.dumps(open_answers[parameters["introspect"]])}, is_final=True)
            return
        if "introspect" in parameters:
            if parameters.get("introspection_token") != TOKEN:
                yield service_pb2.ModelStreamInferResponse(error_message="introspection_token is wrong or missing")
            elif parameters["introspect"] == "snapshot":
                with state.lock:
                    text = json.dumps(state.snapshot)
                yield _response({"text_output": text}, is_final=True)
            elif parameters["introspect"] == "ended":
                yield _response({"text_output": json.dumps(state.ended_since(parameters.get("cursor", "")))},
                                is_final=True)  # fmt: skip
            elif parameters["introspect"] == "scale":
                before, state.num_replicas = state.num_replicas, parameters["replicas"]
                answer = {"replicas": state.num_replicas, "before": before}
                if state.num_remote_replicas is not None:
                    answer["of_other_hosts"] = state.num_remote_replicas
                text = json.dumps(answer)
                yield _response({"text_output": text}, is_final=True)
            elif parameters["introspect"] in ("sleep", "wake_up", "update_weights", "reset_prefix_cache"):
                arguments = {name: value for name, value in parameters.items() if name != "introspection_token"}
                state.operations.append(arguments)
                state.health = {**state.health, "is_sleeping": parameters["introspect"] == "sleep"}
                yield _response({"text_output": "{}"}, is_final=True)
            elif "lora" in parameters["introspect"]:
                yield self._adapters(parameters)
            else:
                id_ = parameters["cancel_request_id"]
                with state.lock:
                    found = [item for item in state.snapshot["requests"] if item["id"] == id_]
                    for item in found:
                        state.snapshot["requests"].remove(item)
                        state.cancelled.append(id_)
                    count = len(state.snapshot["requests"])
                    blocks = state.snapshot["blocks"]
                    blocks["owner"] = [owner if owner < count else -1 for owner in blocks["owner"]]
                yield _response({"text_output": json.dumps({"cancelled": bool(found)})}, is_final=True)
            return
        inputs = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
        if "pooling_parameters" in inputs:
            yield self._vectors(request, inputs)
            return
        prompt = inputs.get("messages", inputs.get("text_input", b"    "))[4:].decode()
        parameters |= json.loads(inputs.get("sampling_parameters", b"    {}")[4:])
        with state.lock:
            state.prompts.append((prompt, parameters))
            files = deserialize_bytes_tensor(inputs["image"]) if "image" in inputs else ()
            state.images.append([base64.b64decode(file) for file in files])
        if parameters.get("slo_class") == "unknown":
            yield service_pb2.ModelStreamInferResponse(
                error_message="slo_class is 'unknown'; there is none of that name"
            )
            return
        for place, word in enumerate(state.words):
            if place and state.stalls:
                cancelled = threading.Event()
                if context.add_callback(cancelled.set):
                    cancelled.wait()
                return
            is_final = place == len(state.words) - 1
            metrics = {"queue_seconds": 0.001, "time_to_first_token_seconds": 0.012, "prefill_seconds": 0.011,
                       "decode_seconds": 0.05, "time_per_output_token_seconds": 0.016, "e2e_seconds": 0.062,
                       "num_prompt_tokens": 5, "num_cached_tokens": 2, "num_output_tokens": 4}  # fmt: skip
            yield _response(
                {"text_output": word, "finish_reason": "length" if is_final else "None", "num_output_tokens": 1,
                 "perf_metrics": json.dumps(metrics if is_final else None)}, is_final=is_final,
            )  # fmt: skip
        with state.lock:
            state.finish(1)

    def _adapters(self, parameters: dict[str, Any]) -> Any:
        adapters, action, name = self._state.adapters, parameters["introspect"], parameters.get("lora_name")
        if action == "load_lora" and (name not in adapters or parameters["load_inplace"]):
            adapters[name] = {"name": name, "folder": parameters["lora_path"], "rank": 8, "num_bytes": 2_500_000,
                              "target_modules": ["q_proj"], "state": "ready"}  # fmt: skip
        elif action != "loras" and (action == "load_lora" or name not in adapters):
            return service_pb2.ModelStreamInferResponse(error_message=f"lora_name is {name!r}")
        elif action == "pin_lora":
            adapters[name]["is_pinned"] = True
        said = {"loras": list(adapters.values()), "unload_lora": {}}.get(action, adapters.get(name))
        if action == "unload_lora":
            del adapters[name]
        return _response({"text_output": json.dumps(said)}, is_final=True)

    def _vectors(self, request: Any, inputs: dict[str, bytes]) -> Any:
        """A row per prompt, [its number, its task's first letter]; three tokens each."""
        parameters = json.loads(inputs["pooling_parameters"][4:])
        with self._state.lock:
            self._state.prompts.append(("", parameters))
        task = parameters.get("task", "embed")
        shapes = {tensor.name: list(tensor.shape) for tensor in request.inputs}
        prompts = shapes.get("text_pair") or shapes.get("input_lengths") or shapes["text_input"]
        rows = [(float(number), float(ord(task[0]))) for number in range(prompts[0])]
        response = service_pb2.ModelInferResponse(model_name=MODEL)
        name = "embeddings" if task == "embed" else "scores"
        response.outputs.add(name=name, datatype="FP32", shape=[len(rows), 2])
        response.raw_output_contents.append(b"".join(struct.pack("<2f", *row) for row in rows))
        response.outputs.add(name="num_input_tokens", datatype="UINT32", shape=[len(rows)])
        response.raw_output_contents.append(struct.pack("<I", 3) * len(rows))
        response.parameters["triton_final_response"].bool_param = True
        return service_pb2.ModelStreamInferResponse(infer_response=response)


def _response(outputs: dict[str, str | int], *, is_final: bool) -> Any:
    response = service_pb2.ModelInferResponse(model_name=MODEL)
    response.parameters["triton_final_response"].bool_param = is_final
    for name, value in outputs.items():
        if isinstance(value, int):
            response.outputs.add(name=name, datatype="UINT32", shape=[1])
            response.raw_output_contents.append(struct.pack("<I", value))
        else:
            data = value.encode()
            response.outputs.add(name=name, datatype="BYTES", shape=[1])
            response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


class FakeTriton:
    """A running stand-in."""

    def __init__(self) -> None:
        self.state = State()
        state = self.state

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = state.metrics_text().encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._grpc = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self.state), self._grpc)
        self.url = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self.metrics = f"127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def start(self) -> None:
        """Open both ports."""
        self._thread.start()
        self._grpc.start()

    def close_metrics(self) -> None:
        """Close the port of /metrics."""
        self._http.shutdown()
        self._http.server_close()

    def stop(self) -> None:
        """Close both ports, whatever is open."""
        self.close_metrics()
        self._grpc.stop(grace=None).wait()


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """A stand-in that runs while the context lasts."""
    fake = FakeTriton()
    fake.start()
    try:
        yield fake
    finally:
        fake.stop()
