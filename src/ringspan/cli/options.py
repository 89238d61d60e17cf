"""Options that several commands have."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
CacheDtype = Annotated[
    str, typer.Option(help="Dtype of cached keys and values: auto (the model's), float32, bfloat16, fp8, int8 or int4.")
]
Dtype = Annotated[str, typer.Option(help="Dtype of the model: auto (as saved), float32 or bfloat16.")]
Nproc = Annotated[
    int | None,
    typer.Option(help="Local processes to start; default: one per CUDA device, else one. Not under torchrun."),
]
PrefillTokens = Annotated[int | None, typer.Option(help="Prompt tokens that a rank reads at once; default: 4096.")]
Tp = Annotated[int, typer.Option(help="Ranks that split heads and weights; the others form the ring.")]
Weights = Annotated[str, typer.Option(help="whole on each rank, sharded (gathered for each token), or auto.")]
