"""Recommend a layout for a machine that need not be present: layouts that fit, their forecasts, the best of each load. No torch."""
