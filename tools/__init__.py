"""Hold development tools: they test dcpbench itself, run from the root of the repository, and are not part of the
package.
"""
