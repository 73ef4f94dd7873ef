"""ftdash.engine.train"""
