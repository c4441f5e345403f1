"""Joining a job: what a machine does on which the same command is typed as on the others."""
