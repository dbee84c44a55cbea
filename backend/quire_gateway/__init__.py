"""The OpenAI gateway: HTTP as OpenAI's clients speak it, in front of any tritonserver that serves Quire's models.

It is a process of its own (`python -m quire_gateway`, or `quire openai`), a client of tritonserver like any
other, and knows nothing of the engine. The model checks every value: what it says becomes OpenAI's error object. The
life of a request:

1. `middleware` checks the key and what it has left (`keys`, `limits`), bounds the body, and names the request.
2. `requests`, `chat` and `responses_request` turn the body into prompts and sampling parameters, renaming what OpenAI
   names otherwise; `chat_format` knows how the model writes calls and reasoning.
3. `triton_client.TritonClient.generate` opens one gRPC stream per prompt; `generation` runs and merges them.
4. `answers`, `chat_answers` and `responses_answer` put what comes back into OpenAI's shapes, whole or as server-sent
   events; `output_parser` finds calls and reasoning in it.
   `large` has one thread in which large bodies and answers are read and written: the event loop serves the others.
   `pooling` does both for embeddings, scores and classes: one request for all prompts.
5. `tokens` and `models` answer what generates nothing.
6. `disconnect` ends all of it when the client leaves: tritonserver sees its request cancelled.
"""
