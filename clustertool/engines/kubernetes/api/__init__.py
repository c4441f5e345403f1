"""This package uses the API server of Kubernetes for one command: objects, logs, and programs in pods."""
