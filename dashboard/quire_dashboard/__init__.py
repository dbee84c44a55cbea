"""The operator's dashboard of a running server: are all requests served within their SLO, and if not, why.

It knows the server by three protocols only: /metrics over HTTP, Triton's gRPC, and the HTTP API of Prometheus if there
is one. Of this project it needs the client and the load generator alone, so it runs against a server elsewhere, and of
another version.

Read `health` for the verdict on a server, `queries` for what the charts show, `app` for how a page is made.
"""

__all__: list[str] = []
