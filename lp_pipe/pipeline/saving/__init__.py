"""Checkpoints of pipelines as files: what is in them, written and read."""

METADATA = ".metadata"  # torch's own file; it comes last, so that what was never finished has none
