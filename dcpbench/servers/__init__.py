"""Measure real servers over HTTP: requests, answers with their times, and the servers' own reports. No torch."""
