"""Integration with torch: the operator, autograd, vmap, FLOP counts, sharding rules."""
