"""The KV cache of a rank: a free list of blocks and a prefix cache on them. Pure; no tensors."""
