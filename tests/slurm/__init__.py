"""Tests against a real Slurm that the fixture starts on this machine."""
