"""Run nodes as processes of one host, forked from a template process."""
