"""Read and validate what the user wrote: hosts, hostfiles, conf.py and job.toml."""
