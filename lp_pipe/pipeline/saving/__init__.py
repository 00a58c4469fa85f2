"""Checkpoints of pipelines as files: their contents, a reader and a writer."""

METADATA = ".metadata"  # torch's own file; written last, so an unfinished checkpoint has none
