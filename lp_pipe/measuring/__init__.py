"""Checks and measurements of pipelines that launch programs: equal bits, times of layers, links between hosts."""
