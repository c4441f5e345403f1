"""This package reads what programs and variables of Slurm state, and writes what is submitted to it. Pure."""
