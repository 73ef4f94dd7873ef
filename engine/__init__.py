"""ftdash.engine"""
