"""Tests, fixtures and benchmarks of ftdash."""
