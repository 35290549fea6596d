"""Engines: a flat batch in, sampled ids out. `torch_engine` computes, `fake` pretends exactly."""
