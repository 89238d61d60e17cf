"""Requirements of a training step on a given cluster: computed, traced or rehearsed."""
