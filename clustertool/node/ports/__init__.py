"""Find free ports and reserve them for a job."""
