"""A stage worker: its share of a schedule, its channels, its optimizer."""
