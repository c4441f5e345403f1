"""Run the ranks of a job on a node, and coordinate the nodes."""
