"""What is trained: the user's layers, cut where, called what, and what travels between them."""
