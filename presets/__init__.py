"""ftdash.presets"""
