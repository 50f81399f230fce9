"""`dcpbench top`: how far a run is, from its files alone and from another terminal than its own. No torch.

Its files are read as facts, and these, with the time and what is alive, made a State: what is shown, printed, or JSON.
"""
