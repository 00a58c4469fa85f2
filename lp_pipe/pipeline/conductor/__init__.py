"""All workers as one: operations, each a whole or nothing."""
