"""How torch sees a call: the operator, autograd, vmap, FLOP counts, sharding rules."""
