"""The operator's dashboard of a running server: are all requests served within their SLO, and if not, why.

It knows the server by three protocols only: /metrics over HTTP, Triton's gRPC, and the HTTP API of Prometheus if there
is one. It imports no other package of this project, so it runs against a server elsewhere, and of another version.

Read `health` for the verdict on a server, `queries` for what the charts show, `app` for how a page is made.
"""

__all__: list[str] = []
