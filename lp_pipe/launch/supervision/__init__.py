"""What the launcher, the agents and the nodes of a run tell each other, and the states that nodes pass through."""
