"""ftdash.tui.commands"""
