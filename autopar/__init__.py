"""autopar: trains the same PyTorch model, with the same numbers, spread over a cluster."""
