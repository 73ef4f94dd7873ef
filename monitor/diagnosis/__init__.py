"""ftdash.monitor.diagnosis"""
