"""What a step holds, and where: shards of weights, what backward needs, what waits on the host."""
