"""ftdash.tui.widgets"""
