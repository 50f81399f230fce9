"""Template, script and style of the dashboard's page."""
