"""Judge a change by limits, baseline and permissions."""
