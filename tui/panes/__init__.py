"""ftdash.tui.panes"""
