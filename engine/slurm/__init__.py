"""Slurm: what a batch script must say, what the queue says, and how to reach a job's nodes."""
