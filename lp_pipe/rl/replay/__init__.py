"""Replay buffers: tables, their rules, and the node that serves them. Needs no torch."""
