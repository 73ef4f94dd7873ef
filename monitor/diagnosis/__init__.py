"""Knows how to find out why a distributed run does not move, and which rank holds the others up."""
