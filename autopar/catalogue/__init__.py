"""Architectures by name, without weights; models from files and factories. `entries` does without torch."""
