"""How anything is said and written."""
