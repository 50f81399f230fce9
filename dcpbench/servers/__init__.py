"""Real servers over HTTP: what they are sent, what comes back and when, and what they say of themselves. No torch."""
