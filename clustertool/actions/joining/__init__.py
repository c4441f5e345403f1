"""This package joins a job from a machine on which the same command is typed as on the others."""
