"""radixmesh.client."""
