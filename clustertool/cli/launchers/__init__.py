"""What other launchers understand: their command lines, and the variables that they read."""
