"""Describe devices: their faults, and why a device is not free."""
