"""Rules of elastic jobs: leases, epochs, and which nodes take part. Pure."""
