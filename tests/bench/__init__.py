"""Benchmarks: each `bench_*.py` has `main()` and prints figures; `python -m tests.bench` runs them all."""
