"""The messages between the launcher, the agents and the nodes of a run, and the states of a node."""
