"""Define the commands of the command line, one file for each command."""
