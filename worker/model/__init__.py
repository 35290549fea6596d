"""worker.model."""
