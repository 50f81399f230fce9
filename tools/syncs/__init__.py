"""Check the accuracy of the detectors of hidden synchronisation (corpus), and the cost of scanning a trace (speed)."""
