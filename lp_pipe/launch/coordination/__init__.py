"""The launcher's knowledge of a running program: states, addresses, exits, the first failure."""
