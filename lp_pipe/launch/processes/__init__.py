"""Nodes as processes of one host, and the template that they are forked from."""
