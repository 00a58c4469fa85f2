"""Ready-made programs. Each module has a function that makes a Program, and is a target of `lp_pipe launch`."""
