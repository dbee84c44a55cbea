"""The Triton backend: tensors to requests, the engine's outputs to responses, cancellation, readiness.

It knows nothing of how tokens are generated: that is `quire_engine`. The life of a request:

1. `model.TritonPythonModel.execute` takes it from the server's stub.
2. `request.parse_request` reads its tensors and parameters: prompt, sampling parameters, options of the answer.
3. `serving.Serving.submit` tokenizes and validates it, and hands it to the engine's event loop.
4. The engine's deltas go to `response_queue.ResponseQueue`, where one thread sends them, merged when they come faster
   than it can send. Large responses go out beside it.
5. `responses` turns a delta into tensors; the last response carries the FINAL flag.
6. Meanwhile `cancellation.CancellationPoller` asks the server whether the client is still there.
"""
