"""Benchmarks: the parts of `pearl bench`."""
