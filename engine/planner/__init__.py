"""ftdash.engine.planner"""
