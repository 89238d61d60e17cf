"""Programs for GPUs, in Triton, that both back ends launch."""
