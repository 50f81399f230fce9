"""A static site over many runs: each point's history with change points, a page per run, a server of one's own.

    finding    record files below a folder become runs, what cannot be read a sentence
    lines      a point's history is a line: same point, hardware, driver and conditions
    changes    where a history changes for good
    data       columns that a browser loads quickly, histories in shards that it loads when asked
    pages      the report of each run, made anew only where its records changed
    site       all of it in a folder that always holds a whole site
    running    how far runs are that are still at work
    server     shows the site on this machine alone, and says when it changed

No torch; what is heavy is imported inside functions.
"""
