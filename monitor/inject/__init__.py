"""Telemetry of scripts that know nothing of ftdash: put in by the environment, on public hooks only."""
