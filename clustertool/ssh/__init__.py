"""Connect to one node over ssh: settings, host keys, authentication, channels."""
