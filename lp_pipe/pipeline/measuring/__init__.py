"""What layers, and links between hosts, take."""
