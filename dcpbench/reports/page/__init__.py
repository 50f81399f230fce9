"""The report as one HTML file that needs nothing else: charts, filters, a table of all points, and no network."""

from __future__ import annotations
