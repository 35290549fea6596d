"""worker.front."""
