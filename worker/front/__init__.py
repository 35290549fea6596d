"""The front of a group: replicas and their jobs, and what routers are told of them. No torch."""
