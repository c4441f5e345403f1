"""Ranks that mpirun starts: the programs that it calls on nodes, which ask the supervisor of their node."""
