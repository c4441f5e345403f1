"""Machines join a job with what this package makes: bundles, joining processes, the secret of machines with a typed command."""
