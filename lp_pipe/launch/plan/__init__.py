"""Decide what will run, where, and with which resources. Nothing is started here."""
