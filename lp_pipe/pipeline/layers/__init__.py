"""The user's layers: the model, its cuts and names, and the messages between stages."""
