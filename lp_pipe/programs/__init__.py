"""Ready-made programs: each module is a function that makes a Program, and a target of `lp_pipe launch`."""
