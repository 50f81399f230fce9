"""`dcpbench top`: show the progress of a run from its files, in another terminal than its own. No torch.

The files are read into Facts; these, the time and the living processes determine a State, which is shown, printed or
written as JSON.
"""
