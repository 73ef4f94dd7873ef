"""ftdash.engine.check"""
