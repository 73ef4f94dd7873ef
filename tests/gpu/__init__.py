"""Trains real configurations on one GPU and holds what was predicted against what torch and NVML measured."""
