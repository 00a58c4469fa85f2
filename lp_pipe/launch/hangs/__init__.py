"""No hang without a reason: who waits for whom, and how that is told."""
