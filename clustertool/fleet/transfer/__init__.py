"""This package copies files between the laptop and one node: by rsync, or in frames of the agent."""
