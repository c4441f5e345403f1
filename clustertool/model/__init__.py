"""This package is pure: no I/O, no clock, no environ. It makes all decisions that are possible before a job starts."""
