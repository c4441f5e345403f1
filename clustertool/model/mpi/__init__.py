"""This package has what mpirun and a job have in common: command lines, hostfile, implementations, ranks' variables. Pure."""
