"""Models that make hidden states of pixels."""
