"""Training processes that somebody else started: found, read and never changed."""
