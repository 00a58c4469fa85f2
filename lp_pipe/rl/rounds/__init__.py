"""What a round of an experiment consists of: the table, the learner and the evaluations. Needs no torch.

`run_experiment` drives these parts in one thread; in a distributed experiment each of them is in a node of its own.
"""
