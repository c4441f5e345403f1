"""Launchers of MPI state a rank's place by variables. This package reads them. Pure."""
