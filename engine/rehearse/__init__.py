"""A plan made small and run for a few steps on this CPU, to prove what needs no GPU."""
