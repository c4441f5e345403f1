"""This package runs a command that is typed on every machine."""
