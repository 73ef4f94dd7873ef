"""The training script: a real fine-tune under any strategy, which checks that what was asked for runs."""
