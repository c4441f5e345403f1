"""MPI: what its launchers state by variables, and how they are called, as pure code."""
