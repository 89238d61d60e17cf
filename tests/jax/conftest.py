"""Eight virtual CPU devices for every JAX test; asked for before anything else makes JAX look for devices."""

import os
from importlib.util import find_spec

os.environ.setdefault("JAX_PLATFORMS", "cpu")

if find_spec("jax"):
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
