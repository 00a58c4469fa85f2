"""Shared by the tests of the pipeline."""
