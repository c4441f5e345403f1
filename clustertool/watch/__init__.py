"""This package follows a job without I/O: frames -> events -> job view; bytes -> lines; the verdict."""
