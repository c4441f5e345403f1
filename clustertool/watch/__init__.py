"""Follows a job, sans I/O: frames -> events -> status; bytes -> lines; the verdict (who failed first, who is a victim)."""
