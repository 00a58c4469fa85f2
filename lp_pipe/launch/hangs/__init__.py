"""Find waits that last too long, name deadlocks, and report or end what hangs."""
