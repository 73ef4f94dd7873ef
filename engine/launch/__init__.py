"""Turns a plan, or somebody's own launcher command, into a running job with a run directory."""
