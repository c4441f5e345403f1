"""Machines that join a job: bundles, joining processes, and the secret of machines on which one command is typed."""
