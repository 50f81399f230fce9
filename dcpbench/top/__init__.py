"""`dcpbench top`: how far a run is, from its files alone and from another terminal than its own. No torch.

facts.py        files of a run → what they say
state.py        facts → State, a pure function; what is shown, printed and written as JSON
estimate.py     how long the points that are left may take
gpus.py         clocks, power, temperature and the like, now
words.py        parts of a State in words
render.py       State → what a terminal shows
plain.py        two States → lines for a pipe or a log
watch.py        the command: which run, how often, and its end
"""
