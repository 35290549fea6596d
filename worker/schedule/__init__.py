"""worker.schedule."""
