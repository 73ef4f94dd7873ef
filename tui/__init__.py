"""ftdash.tui"""
