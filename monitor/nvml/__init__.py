"""ftdash.monitor.nvml"""
