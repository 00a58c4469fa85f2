"""Measurement of layers, and of links between hosts."""
