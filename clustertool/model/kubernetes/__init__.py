"""This package describes jobs in pods of Kubernetes: settings, names, manifests, and what pods leave behind."""
