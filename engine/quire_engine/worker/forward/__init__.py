"""From a step's inputs to hidden states: op by op, by a recording, or by CUDA graphs."""
