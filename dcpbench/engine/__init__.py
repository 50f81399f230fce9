"""The engine of one rank: pools, weights, the model, and decode steps."""
