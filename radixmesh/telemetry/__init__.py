"""radixmesh.telemetry."""
