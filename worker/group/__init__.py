"""A replica's ranks: how they start, stay in lockstep and talk to the front."""
