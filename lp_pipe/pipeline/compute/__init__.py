"""One stage's forwards and backwards, and where they happen. Knows nothing of schedules or channels."""
