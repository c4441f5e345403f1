"""Join a job as a node: meet the coordinator, get a part of its plan, and become the node's supervisor in the foreground."""
