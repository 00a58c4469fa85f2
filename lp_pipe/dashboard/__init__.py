"""The web page of `lp_pipe ui`: a server over the files of runs, in a process of its own."""
