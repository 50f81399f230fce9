"""Whether a change may pass: limits, baseline, permissions."""
