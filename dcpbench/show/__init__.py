"""How anything is said and written, whoever says it.

`numbers`: digits, units, times, shares. `text`: words in sentences, and strings of others made fit to be shown.
`terminal`: Rich's console, lines on stderr, progress. `streams`: stdout and stderr that take any text, and readers that
have gone away. `whole_files`: files and folders that are written whole or not at all.
"""
