"""Check the accuracy of the detectors of hidden synchronisation, and the cost of scanning a trace."""
