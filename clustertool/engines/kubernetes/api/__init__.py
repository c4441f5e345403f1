"""The API server of Kubernetes as one command uses it: objects, logs, and programs in pods."""
