"""What a request passes on its way in and out: tokenization, detokenization, and the assembly of outputs."""
