"""This package reads what other launchers understand: their command lines and variables."""
