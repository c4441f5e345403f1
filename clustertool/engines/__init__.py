"""Engines provide the nodes of jobs and start the supervisors there."""
