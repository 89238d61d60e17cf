"""Everything that is to be measured on one CUDA device: ``python -m benchmarks.gpu``."""
