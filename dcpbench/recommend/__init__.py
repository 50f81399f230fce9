"""Which layout to take on a machine that may not be here: layouts that fit, their forecasts, the best of each load. No torch."""
