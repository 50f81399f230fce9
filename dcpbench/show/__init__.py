"""Format and write text, figures and files, shared by all subpackages."""
