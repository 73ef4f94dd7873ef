"""Checkpoints on disk: what each is, whether it is whole, and how it becomes another kind."""
