"""The Triton backend: tensors to requests, the engine's outputs to responses, cancellation, readiness.

It knows nothing of how tokens are made: that is `quire_engine`. A request's way:

1. `model.TritonPythonModel.execute` takes it from the server's stub.
2. `request.parse_request` reads its tensors and parameters: prompt, sampling parameters, options of the answer.
3. `serving.Serving.submit` has it tokenized and validated, and hands it to the engine's event loop.
4. The engine's deltas come to `response_queue.ResponseQueue`, where one thread sends them, merged when they come faster
   than they can go.
5. `responses` says what a delta looks like as tensors; the last response carries the FINAL flag.
6. All the while `cancellation.CancellationPoller` asks the server whether the client still wants it.
"""
