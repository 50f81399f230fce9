"""How anything is said and written, whoever says it."""
