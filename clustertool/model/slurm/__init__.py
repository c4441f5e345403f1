"""Slurm: what its programs and its variables state, and what is submitted to it, as pure code."""
