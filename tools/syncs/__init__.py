"""Whether the detectors of hidden synchronisation can be believed (corpus), and what scanning a trace costs (speed)."""
