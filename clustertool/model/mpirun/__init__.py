"""mpirun of a job in mode mpi: its implementation, its command line, its hostfile, and what users may add. Pure."""
