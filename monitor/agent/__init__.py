"""ftdash.monitor.agent"""
