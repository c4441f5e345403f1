"""A command that is typed on every machine."""
