"""This package talks to all nodes of one command: connections, dispatch, execution of a plan, the embedded cluster."""
