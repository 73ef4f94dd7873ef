"""ftdash.monitor.hook"""
