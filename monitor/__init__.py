"""ftdash.monitor"""
