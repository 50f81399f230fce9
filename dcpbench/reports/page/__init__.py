"""Write the report as one self-contained HTML file: charts, filters, a table of all points, and no network access."""

from __future__ import annotations
