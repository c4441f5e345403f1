"""mpirun calls these programs on nodes, which ask the supervisor of their node."""
