"""Collective operations among the nodes of a group, whose members may change."""
