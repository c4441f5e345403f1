"""Read, follow, stop and report the jobs on a node."""
