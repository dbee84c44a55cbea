"""The engine's statistics as metrics.

It knows the engine only by `quire_engine.stats`, and Triton Inference Server only by its custom metrics' interface.
`quire_monitoring.prometheus`, which needs prometheus-client, is only imported by its users.
"""
