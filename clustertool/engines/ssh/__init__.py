"""The ssh engine: jobs on the hosts of conf.py, or on this machine."""
