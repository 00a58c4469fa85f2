"""What the launcher knows of a running program: states, addresses, exits, the first failure."""
