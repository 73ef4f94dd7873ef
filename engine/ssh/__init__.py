"""Nodes without a scheduler: a hosts file, the user's own ssh client, the same agent."""
