"""Agents: builders for experiments."""
