"""Coordinate the nodes of a job: pure decisions, the coordinator's server, and the client of every other node."""
