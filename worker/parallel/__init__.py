"""How the ranks of a replica compute one model together: what is split, and how tensors travel."""
