"""radixmesh.rpc."""
