"""Interpret the records of a job: events, outcome, usage, progress."""
