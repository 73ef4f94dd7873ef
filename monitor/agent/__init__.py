"""The node agent: starts a launcher, samples ranks and GPUs, serves requests, records how it all ended."""
