"""Checkpoints of pipelines as files: what is in them, written and read."""
