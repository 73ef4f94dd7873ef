"""ftdash.engine.model"""
