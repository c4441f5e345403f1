"""Collect the facts of a node before a job starts."""
