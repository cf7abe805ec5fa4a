"""Real models and servers for tests and the demo, for this package and for others."""
