"""What is measured: speed and memory as ratios from one interleaved run. Results are data, see ``benchmarks/``."""
