"""The APIs by which a client could reach into the server's memory, its files and its log are closed to everybody."""

import socket
import struct

import grpc
import pytest
from support.clients import http, run
from support.processes import command_line
from support.serving import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.server

HTTP = ("/v2/logging", "/v2/trace/setting", "/v2/models/tinypy/trace/setting", "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status")  # fmt: skip
GRPC = {
    "LogSettings": service_pb2.LogSettingsRequest, "TraceSetting": service_pb2.TraceSettingRequest,
    "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest,
    "CudaSharedMemoryStatus": service_pb2.CudaSharedMemoryStatusRequest,
}  # fmt: skip


def test_they_are_closed_and_all_else_is_open(server: Server) -> None:
    for path in HTTP:
        status, content = http(server, path)
        assert (status, "restricted" in content["error"]) == (403, True)
    register = {"key": "/quire", "offset": 0, "byte_size": 1}
    assert http(server, "/v2/systemsharedmemory/region/x/register", register)[0] == 403
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for method, request in GRPC.items():
            with pytest.raises(grpc.RpcError, match="restricted"):
                getattr(stub, method)(request())
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert run(server, text_input="def add(", max_tokens=2).text
    assert http(server, "/v2/repository/index")[0] == 200
    assert http(server, "/v2/models/tinypy/stats")[0] == 200


def test_not_even_who_reads_the_command_line_opens_them(server: Server) -> None:
    """Every user of the machine can."""
    words = [word for pid in server.run_id.processes() for word in command_line(pid).split(" ") if "restricted" in word]
    assert len(words) == 2
    name, _, value = words[0].rpartition(":")[2].partition("=")
    for sent in (value, value.replace("\n", "\n "), value.replace("\n", "\r\n "), value.replace("\n", " ")):
        request = f"GET /v2/logging HTTP/1.1\r\nHost: x\r\n{name}: {sent}\r\nConnection: close\r\n\r\n"
        assert b"log_verbose_level" not in _exchange(server.http, request.encode())
    for prefix in ("triton-grpc-protocol-", ""):
        for name_sent in (name, name.lower()):
            answer = _exchange(server.grpc, _log_settings(f"{prefix}{name_sent}".encode(), value.encode()))
            assert b"grpc-status" in answer
            assert b"log_verbose_level" not in answer
    # The same bytes with a header that nothing asks for reach what is open.
    assert b"grpc-status\x010" in _exchange(server.grpc, _log_settings(b"x", b"y", method=b"ServerLive"))


def _exchange(address: str, data: bytes) -> bytes:
    """What the server answers until it says no more."""
    host, port = address.split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        while b"grpc-status" not in answer and (more := connection.recv(65536)):
            answer += more
    return answer


def _log_settings(name: bytes, value: bytes, method: bytes = b"LogSettings") -> bytes:
    """A gRPC call with an empty message, and a header that no library would send."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    path = b"/inference.GRPCInferenceService/" + method
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers",
               b"content-type": b"application/grpc", name: value}  # fmt: skip
    block = b"".join(literal(*header) for header in headers.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return preface + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
