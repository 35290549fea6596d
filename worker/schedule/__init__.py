"""The scheduler of a replica, pure: the same inputs give the same plans on every rank."""
