"""Nodes join a job that no laptop starts. This package has what each joining process gets, and what the coordinator decides."""
