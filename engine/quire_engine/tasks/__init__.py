"""Tasks: what becomes of hidden states that are not sampled."""
