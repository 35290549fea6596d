"""Starts ranks on the hosts of a group: fork servers, each host's share, the line to host 0."""
