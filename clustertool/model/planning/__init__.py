"""Compute the plan of a job: ranks, ports, devices, shards, environment, and the requests that start it."""
