"""Images in prompts: what makes hidden states of them.

::

    image ──► processing ──────► tower ───────────► ImageEncoder ──► PromptPart
    (bytes)   (process with      (process with      (in the frontend: cache,
              limits: decode,    the weights:       each placeholder of the prompt
              resize, norm)      pixels → states)   becomes the image's tokens)

To the engine core an image is a `PromptPart`: positions with given hidden states and a digest. So chunks, the prefix
cache, preemption, replay, roles and replicas know nothing of images. A family of models is a file in `families/`, which
reads `config.json` and does not use torch, and one in `towers/`; `families/other.py` is that of all others, in
transformers' code.
"""
