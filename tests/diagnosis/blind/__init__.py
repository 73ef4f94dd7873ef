"""Training scripts that hang, or only seem to, by somebody who had not read the rules of diagnosis."""
