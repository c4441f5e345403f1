"""A job in mode mpi starts by mpirun: its implementation, its command line, its hostfile, and what users may add. Pure."""
