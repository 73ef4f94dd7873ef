"""ftdash.engine.configs"""
