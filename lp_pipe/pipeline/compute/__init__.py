"""The forwards and backwards of a stage, and where they happen; without schedules or channels."""
