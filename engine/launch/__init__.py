"""ftdash.engine.launch"""
