"""One host's part in a group: its fork server, its share of the ranks, its link to host 0."""
