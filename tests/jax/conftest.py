"""Eight virtual CPU devices for every JAX test, asked for before anything else makes JAX look for devices; and machine
code made in three quarters of the time: tests compile far more than they compute.
"""

import os
from importlib.util import find_spec

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

if find_spec("jax"):
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # machine code need not say where it comes from
