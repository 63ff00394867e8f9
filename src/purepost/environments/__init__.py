"""Environments: in JAX, to be fused with the rest, and in Python, run on the host."""
