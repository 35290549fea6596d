"""Replays requests against a simulated fleet: a virtual clock, real routing, modelled workers.

The meta-tree, the marks, the feed, the loads, the board and the policies are the router's own
modules. Modelled are the workers (`worker.py` says how), the links (`router.py`) and time.
"""
