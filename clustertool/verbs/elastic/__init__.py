"""Verbs about the nodes of an elastic job."""
