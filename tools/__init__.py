"""Development tools: they test dcpbench itself, are run from the root of the repository, and are no part of the package."""
