"""The real model class under fake tensors: what its memory would be, without a GPU."""
