"""Eight virtual CPU devices for every JAX test, asked for before anything else makes JAX look for devices; and machine
code made in three quarters of the time: tests compile far more than they compute.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# machine code need not say where it comes from
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
