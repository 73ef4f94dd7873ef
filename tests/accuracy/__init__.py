"""Compares the planner with published measurements: peak memory and tokens/s of runs others made."""
