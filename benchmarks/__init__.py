"""Benchmarks: each module is a command that prints a table and one JSON object."""
