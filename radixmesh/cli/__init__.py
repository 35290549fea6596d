"""radixmesh.cli."""
