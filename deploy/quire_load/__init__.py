"""Load on a server from outside, and what it measured: one generator for `quire bench`, `quire tune` and the dashboard.

::

    datasets ──► requests ─┐
    arrivals ──► times ────┴─► Load ──► an endpoint (gRPC streams, generate_stream, OpenAI) ──► records ──► report
                                                  /metrics before and after (scrape, server_figures) ──► beside them

It knows a server by what goes over the wire, and nothing of the engine: none of our other packages is imported here.
"""
