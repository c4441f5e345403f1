"""Answer the requests of one command on a node, and start a job's supervisor."""
