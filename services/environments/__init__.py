"""Environments: the interface a user implements, how one is found, and the built-in ones."""
