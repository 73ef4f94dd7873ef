"""Traps in configs, scripts and plans, each a named finding with its evidence and its fix."""
