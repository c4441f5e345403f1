"""What verbs and the Python API do on a cluster: read the configuration, start, find, follow and stop jobs, fetch output."""
