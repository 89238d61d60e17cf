"""Eight virtual CPU devices for every JAX test, asked for before anything else makes JAX look for devices; and machine
code made in half of the time: tests compile far more than they compute.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec

os.environ.setdefault("JAX_PLATFORMS", "cpu")

if find_spec("jax"):
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if version("jaxlib").startswith("0.10."):  # XLA's flags come and go, and one that is unknown ends the process
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)

    import jax

    jax.config.update("jax_num_cpu_devices", 8)
