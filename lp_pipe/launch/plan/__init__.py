"""What will run, where, and with what: nothing runs here."""
