"""Several hosts: agents, what they are sent, and what becomes of a host that is lost."""
