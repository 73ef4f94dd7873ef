"""A folder for PYTHONPATH: its sitecustomize arms the telemetry of every Python started below a launcher."""
