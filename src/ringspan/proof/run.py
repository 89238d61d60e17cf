"""A proof: a small model like the given one, trained with some options on ranks and on one process."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import RingspanError, UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.plan.model.reader import config_of
from ringspan.proof import compare, steps
from ringspan.proof.batches import Batch, batches
from ringspan.proof.small import small_model
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.mesh import init_mesh

GENERATION: Final = "generation"
NOT_TRIED: Final = (
    "the model's full size, its own weights and longer sequences",
    "dropout",
    "other dtypes than float64, so no rounding of bfloat16",
)


@dataclass
class Row:
    """One trial: ``error`` is the worst over all ranks; ``refused`` the reason if the model does not take the batch."""

    batch: str
    error: float | None = None
    of: str = ""
    place: str = ""
    refused: str = ""

    @property
    def is_exact(self) -> bool:
        return self.error is None or self.error <= compare.BOUND


@dataclass
class Proof:
    """Trials of a proof, with the small model, the mesh and the options that they ran on."""

    model: str
    layers: int
    parameters: int
    mesh: dict[str, int]
    options: dict[str, Any]
    rows: list[Row] = field(default_factory=list[Row])
    smallest: dict[str, Any] | None = None
    """The fewest options with which it still differs; None if all is exact."""
    seconds: float = 0.0
    not_tried: list[str] = field(default_factory=lambda: [*NOT_TRIED])

    @property
    def is_exact(self) -> bool:
        return all(row.is_exact for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the proof as plain values, with the verdict and the bound."""
        return asdict(self) | {"exact": self.is_exact, "bound": compare.BOUND}


def prove_on(
    mesh: DeviceMesh,
    config: PreTrainedConfig,
    name: str,
    options: dict[str, Any],
    doing: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Train a small model of a config on every batch, on a mesh and on one process; every rank calls it.

    Equals, for each batch, ``STEPS`` steps of AdamW of plain transformers in float64: losses, every gradient of the
    first, weights after the last, and logits in evaluation. Documents and rows are computed by themselves there.

    Raises:
        UnsupportedError, ConfigError, LayoutError: what ``parallelize`` raises for the model or its options.
    """
    started = time.perf_counter()
    small, layers, parameters, left_out = small_model(config)
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names or ()}
    proof = Proof(name, layers, parameters, sizes, options)
    if left_out:
        proof.not_tried.insert(0, f"{left_out} further kinds of layers")
    given = batches(mesh["ring"].size(), options.get("folds", 1))
    for label, batch in given.items():
        doing(label)
        proof.rows.append(_try(mesh, small, label, batch, options))
    doing(GENERATION)
    proof.rows.append(_try_writing(mesh, small, options))
    wrong = next((row for row in proof.rows if not row.is_exact), None)
    if wrong is not None and wrong.batch in given:
        doing("looking for the place")
        batch = given[wrong.batch]
        proof.smallest = _fewest(mesh, small, wrong.batch, batch, options)
        wrong.place = _place(mesh, small, batch, options)
    proof.seconds = time.perf_counter() - started
    return proof


def _try(
    mesh: DeviceMesh,
    config: PreTrainedConfig,
    label: str,
    batch: Batch,
    options: dict[str, Any],
) -> Row:
    """Run a batch on all ranks; the row has the worst error of any of them."""
    try:
        found = steps.run_on_ring(config, batch, mesh, options)
    except UnsupportedError as error:
        if label == "one sequence":
            raise  # the model or an option, and not this batch
        return Row(label, refused=str(error))
    expected = steps.run_alone(config, batch)
    error = compare.worst_error(found, expected, batch)
    return Row(label, *max(gather_over(mesh, tuple(error))))


def _try_writing(
    mesh: DeviceMesh, config: PreTrainedConfig, options: dict[str, Any]
) -> Row:
    """Let the model write over a split cache; its tokens and logits equal those on one process."""
    try:
        expected = steps.write(steps.make_model(config))
    except Exception as error:  # transformers itself may not generate with it
        reason = f"{type(error).__name__}: {one_line(error)}"
        return Row(GENERATION, refused=f"not on one process either: {reason}")
    try:
        found = steps.write(parallelize(steps.make_model(config), mesh, **options))
    except UnsupportedError as error:
        return Row(GENERATION, refused=str(error))
    error = compare.worst_error(found, expected)
    return Row(GENERATION, *max(gather_over(mesh, tuple(error))))


def _fewest(
    mesh: DeviceMesh,
    config: PreTrainedConfig,
    label: str,
    batch: Batch,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the options that are left when each is taken away that the difference does not need."""
    left = dict(options)
    for name in options:
        fewer = {key: value for key, value in left.items() if key != name}
        try:
            row = _try(mesh, config, label, batch, fewer)
        except RingspanError:  # an option that others need
            continue
        if not row.is_exact:
            left = fewer
    return left


def _place(
    mesh: DeviceMesh, config: PreTrainedConfig, batch: Batch, options: dict[str, Any]
) -> str:
    """Name the first layer's output beyond the bound, or the first gradient if all outputs are right."""
    place: compare.Place | None = None
    if options.get("folds", 1) == 1:
        found = steps.layers_on_ring(config, batch, mesh, options)
        expected = steps.layers_alone(config, batch)
        place = compare.first_place(found, expected, batch, compare.BOUND)
    if place is None:
        on_ring = steps.run_on_ring(config, batch, mesh, options)
        alone = steps.run_alone(config, batch)
        place = compare.first_gradient(on_ring, alone, compare.BOUND)
    said = gather_over(mesh, "" if place is None else str(place))
    return next(filter(None, said), "")


def prove(
    model: PreTrainedModel | PreTrainedConfig,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Proof:
    """Prove that a model like this one is exact on a mesh with some options; every rank calls it.

    A small model with a layer of each kind, random weights and float64 takes two optimizer steps on several batches, on
    the mesh and by plain transformers on one process: see ``Proof``, whose ``is_exact`` is the verdict.

    Args:
        model: a model, whose config counts and not its weights, or a config.
        mesh: as for ``parallelize``; a ring of all ranks if None.
        options: of ``parallelize``.

    Raises:
        UnsupportedError, ConfigError, LayoutError: on every rank, a model or options that ``parallelize`` refuses.
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    return prove_on(
        init_mesh() if mesh is None else mesh, config, type(model).__name__, options
    )


def prove_here(
    config: str,
    name: str,
    options: dict[str, Any],
    sizes: dict[str, Any],
    doing: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Prove a model on the ranks that there are: ``config`` is its config.json, ``sizes`` are for ``init_mesh``."""
    mesh = init_mesh(**sizes)
    return prove_on(mesh, config_of(json.loads(config), name), name, options, doing)
