"""Runs emitted source: ranks, collectives, parameters, the compiled module."""
