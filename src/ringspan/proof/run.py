"""A proof: a small model like the given one, trained with some options on ranks and on one process."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from ringspan.core.errors import (
    ConfigError,
    PeerMismatch,
    RingspanError,
    UnsupportedError,
)
from ringspan.core.messages.lines import one_line
from ringspan.proof import compare, steps
from ringspan.proof.batches import Batch, batches
from ringspan.proof.compare import Bounds
from ringspan.proof.options import OF_UPDATE, options_of_trial
from ringspan.proof.own_weights import OwnWeights, refuse_too_large
from ringspan.proof.packed import refuse_packing
from ringspan.proof.routed import has_experts, why_live
from ringspan.proof.seeing import (
    IMAGES,
    SEEING_VOCABULARY,
    TOWERS,
    batch_with_images,
    sees,
)
from ringspan.proof.small import FEW_TOKENS, plain_of, small_model
from ringspan.proof.steps import Outcome
from ringspan.proof.trial import Subject, Trial
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.adapters import base_of, is_peft
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.runtime.mesh import init_mesh

GENERATION: Final = "generation"
_FIRST: Final = "one sequence"
_OF_NUMBERS: Final = ("z_loss", "label_smoothing", *OF_UPDATE)
"""Options that one process takes too."""
COUNTS_PADDING: Final = "transformers gives other numbers if the padding tokens are others; pad on the right"
NOT_TRIED: Final = (
    "the model's full size, its own weights and longer sequences",
    "dropout",
    "the training's own optimizer and its schedule: a trial takes AdamW of torch",
)


@dataclass
class Row:
    """One trial: ``error`` is the worst over all ranks; ``refused`` the reason if the model does not take the batch."""

    batch: str
    error: float | None = None
    of: str = ""
    bound: float = compare.BOUND
    dtype: str = "float64"
    place: str = ""
    refused: str = ""
    tokens: int = 0
    """Tokens of a row of the batch, if the wrong positions are known."""
    wrong: list[list[int]] = field(default_factory=list[list[int]])
    """Positions that are wrong at the place, a list for each row of the batch."""

    @property
    def is_exact(self) -> bool:
        return self.error is None or self.error <= self.bound


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
    weights: str = "random"
    """A folder, or random ones."""
    seconds: float = 0.0
    not_tried: list[str] = field(default_factory=lambda: [*NOT_TRIED])
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_exact(self) -> bool:
        return all(row.is_exact for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the proof as plain values, with the verdict."""
        return asdict(self) | {"exact": self.is_exact}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question to a proof: a model by its config, and the options of a step."""

    config: PreTrainedConfig
    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of ``parallelize``, and of an optimizer step."""
    adapter: Any = None
    """Config of PEFT, for an adapter that trains in place of the weights."""
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    """Dtypes that layers compute in, each with that of the weights; those of the device if there are none."""
    trained: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    """The same of the training, for devices that a proof tries it on."""
    weights: str | None = None
    """Folder with the weights for a model of full width; None for random ones of a small model."""
    tree: bool = False
    """Try a tree of rows with one beginning too."""
    not_tried: tuple[str, ...] = ()
    """What else was asked for, and is named as not tried."""


class _Tried(NamedTuple):
    """A batch that was run, with its outcomes on the ring and on one process."""

    row: Row
    trial: Trial
    batch: Batch
    found: Outcome
    truth: Outcome
    bounds: Bounds


class _Alone:
    """Outcomes of a batch on one process, by plain transformers: each once, whatever ring it is compared with."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[Any, ...], tuple[Outcome, Bounds]] = {}
        self.unrouted: dict[str, None] = {}
        """Why tokens of narrower dtypes went their own ways, in the order in which it was found."""

    def of(self, trial: Trial, label: str, batch: Batch) -> tuple[Outcome, Bounds]:
        """Return the outcome in float64, and the bounds of the trial's dtype.

        If tokens of the trial's dtype can go the routes of float64, the outcome has these.
        """
        of_loss = [trial.options.get(name) for name in _OF_NUMBERS]
        key = label, trial.dtype, why_live(trial, batch), *of_loss
        if key not in self._outcomes:
            if any(other[0] != label for other in self._outcomes):
                self._outcomes.clear()  # weights of full width take memory
            truth = self._truth(trial, batch)
            bounds = compare.IN_FLOAT64
            if not trial.is_exact_dtype:
                one = steps.run_alone(trial, batch, routes=truth.routes)
                bounds = compare.bounds_of(one, truth, batch, trial.dtype)
            self._outcomes[key] = truth, bounds
        return self._outcomes[key]

    def _truth(self, trial: Trial, batch: Batch) -> Outcome:
        """Run a batch in float64, with the routes of its tokens if they can go the same ways in a narrower dtype."""
        if trial.is_exact_dtype or not has_experts(trial):
            return steps.run_alone(trial, batch, torch.float64)
        reason, truth = why_live(trial, batch), None
        if not reason:
            try:
                truth = steps.run_alone(trial, batch, torch.float64, notes_routes=True)
            except UnsupportedError as error:
                reason = str(error).removeprefix("routes: ").partition(";")[0]
            else:
                reason = "" if truth.routes else "no layer chooses them by scores"
        if reason:
            self.unrouted[reason] = None
        return truth or steps.run_alone(trial, batch, torch.float64)


def prove_on(
    mesh: DeviceMesh, asked: Asked, doing: Callable[[str], None] = lambda _: None
) -> Proof:
    """Train a small model of a config on every batch, on a mesh and on one process; every rank calls it.

    Equals, for each batch, ``STEPS`` steps of AdamW of plain transformers in float64: losses, every gradient of the
    first, weights after the last, and logits in evaluation. Documents and rows are computed separately there.

    Raises:
        UnsupportedError, ConfigError, LayoutError: what ``parallelize`` raises for the model or its options.
        PeerMismatch: ranks with other releases of what computes.
    """
    started = time.perf_counter()
    versions = _versions(mesh)
    is_narrow = asked.weights is None
    small, layers, parameters, left_out, kept = small_model(
        asked.config, is_narrow=is_narrow
    )
    options, untried = options_of_trial(asked.options)
    packed, weights = _packed(asked.config), None
    dtypes = _dtypes_of(mesh, asked, packed is not None)
    if asked.weights is not None:
        weights = _own_weights(mesh, asked, kept, parameters)
    if packed is not None:
        refuse_packing(packed, asked.adapter)
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names or ()}
    proof = Proof(
        asked.name, layers, parameters, sizes, _plain(options), versions=versions
    )
    if asked.weights is not None:
        proof.weights = asked.weights
    proof.not_tried = [*_not_tried(asked, small, left_out), *untried, *asked.not_tried]
    vocabulary, given = _batches(mesh, small, options, tree=asked.tree)
    subject = Subject(
        config=small, adapter=asked.adapter, packed=packed, weights=weights
    )
    alone, wrong = _Alone(), None
    for dtype, stored in dtypes:
        trial = Trial(
            subject=subject,
            mesh=mesh,
            options=options,
            dtype=dtype,
            parameters=stored,
        )
        found = _try_all(trial, given, vocabulary, alone, proof, doing)
        wrong = wrong or found
    if all(row.dtype != "bfloat16" for row in proof.rows):
        proof.not_tried.append("rounding of bfloat16: give --dtype bfloat16")
    proof.not_tried += filter(None, map(_says_little, proof.rows))
    if wrong is not None:
        doing("looking for the place")
        proof.smallest = _plain(_fewest(wrong, alone))
        _find_place(wrong)
    proof.seconds = time.perf_counter() - started
    return proof


def _says_little(row: Row) -> str:
    """Return that a row's bound is as wide as the numbers themselves, so that less than that does not show."""
    if row.error is None or row.bound < 1:
        return ""
    share = row.bound / compare.MARGIN
    return f"mistakes below the rounding of {row.dtype} in {row.batch}: one process is off by {share:.0%} there"


def _not_tried(asked: Asked, small: PreTrainedConfig, left_out: int) -> Iterator[str]:
    """Yield what no trial has, and what this model's small one leaves out."""
    if left_out:
        yield f"{left_out} further kinds of layers"
    if sees(asked.config) and not sees(small):
        yield f"images and sound: of {asked.name} the language model alone was tried"
    elif sees(small) and small.model_type not in TOWERS:
        yield "images and sound: batches have only text"
    if sees(small) and asked.weights is not None:
        yield "the weights of its towers: small random ones are in their place"
    size, *others = NOT_TRIED
    if asked.weights is not None:
        size = f"all layers, longer sequences, and tokens after the first {FEW_TOKENS} of the vocabulary"
    yield size
    yield from others
    yield from _untried_of(asked)


def _batches(
    mesh: DeviceMesh, small: PreTrainedConfig, options: dict[str, Any], *, tree: bool
) -> tuple[int, dict[str, Batch]]:
    """Return the tokens that batches choose from, and the batches by their names."""
    vocabulary = SEEING_VOCABULARY if sees(small) else text_config(small).vocab_size
    given = batches(
        mesh["ring"].size(), options.get("folds", 1), vocabulary=vocabulary, tree=tree
    )
    media = family_of(small).media
    if media is not None and media.is_prefix and media.blocks:
        for batch in given.values():  # plain text, not a prompt
            batch.inputs[media.blocks] = torch.ones_like(batch.inputs["input_ids"])
    if small.model_type in TOWERS:
        length = given[_FIRST].inputs["input_ids"].shape[1]
        given[IMAGES] = batch_with_images(small, length)
    return vocabulary, given


def _try_all(
    trial: Trial, given: dict[str, Batch], vocabulary: int, alone: _Alone, proof: Proof, doing: Callable[[str], None],
) -> _Tried | None:  # fmt: skip
    """Add a row to the proof for each batch and for generation; return the first batch that differs."""
    wrong = None
    for label, batch in given.items():
        doing(label if trial.is_exact_dtype else f"{label} in {_name(trial.dtype)}")
        tried = _try(trial, label, batch, alone)
        row = tried if isinstance(tried, Row) else tried.row
        proof.rows.append(row)
        if wrong is None and not isinstance(tried, Row) and not row.is_exact:
            wrong = tried
    if trial.dtype.itemsize >= 4:
        doing(GENERATION)
        proof.rows.append(_try_writing(trial, vocabulary))
    else:
        proof.not_tried.append(f"generation in {_name(trial.dtype)}")
    proof.not_tried += [
        f"the same experts in {_name(trial.dtype)} as in float64 ({reason}): a token that rounding sends elsewhere "
        "counts as a difference"
        for reason in alone.unrouted
    ]
    alone.unrouted.clear()
    return wrong


def _try(trial: Trial, label: str, batch: Batch, alone: _Alone) -> _Tried | Row:
    """Run a batch on all ranks; the row has the worst error of any of them."""
    row = Row(label, dtype=_name(trial.dtype))

    def routes_of(counts_padding: bool) -> Sequence[Tensor]:
        if trial.is_exact_dtype:
            return ()
        read = batch.with_padding() if counts_padding else batch
        return alone.of(trial, label, read)[0].routes

    try:
        found = steps.run_on_ring(trial, batch, routes_of)
    except UnsupportedError as error:
        if label == _FIRST:
            raise  # the model or an option, and not this batch
        row.refused = str(error)
        return row
    except RingspanError:
        raise
    except Exception as error:
        _refuse_broken(trial, batch, error)
        raise
    if found.counts_padding:
        batch = batch.with_padding()
    truth, bounds = alone.of(trial, label, batch)
    error = compare.worst_error(found, truth, batch, bounds)
    _, row.error, row.of, row.bound = max(gather_over(trial.mesh, tuple(error)))
    if not row.is_exact and _counts_padding(trial, batch, truth):
        row.error, row.refused = None, COUNTS_PADDING
        return row
    return _Tried(row, trial, batch, found, truth, bounds)


def _counts_padding(trial: Trial, batch: Batch, truth: Outcome) -> bool:
    """Return whether plain transformers gives other numbers for the same tokens next to other padding."""
    if not batch.keeps_padding:
        return False
    found = steps.run_alone(trial, batch.with_other_padding(), torch.float64)
    return compare.worst_error(found, truth, batch).value > compare.BOUND


def _refuse_broken(trial: Trial, batch: Batch, error: Exception) -> None:
    """Raise UnsupportedError if plain transformers cannot train the model on one process either."""
    try:
        steps.run_alone(trial, batch, torch.float64)
    except Exception:  # whatever its code raises
        raise UnsupportedError(
            f"{trial.subject.config.model_type} does not run in transformers by itself: {type(error).__name__}: "
            f"{one_line(error)}; complete its config, or use another release"
        ) from error


def _try_writing(trial: Trial, vocabulary: int) -> Row:
    """Let the model write over a split cache; its tokens and logits equal those on one process."""
    row = Row(GENERATION, dtype=_name(trial.dtype))
    try:
        truth = steps.write(trial.make(torch.float64), vocabulary)
        one = truth
        if not trial.is_exact_dtype:
            one = steps.write(trial.make(), vocabulary)
    except Exception as error:  # transformers itself may not generate with it
        reason = f"{type(error).__name__}: {one_line(error)}"
        row.refused = f"not on one process either: {reason}"
        return row
    try:
        found = steps.write(steps.on_ring(trial), vocabulary)
    except UnsupportedError as error:
        row.refused = str(error)
        return row
    bounds = compare.IN_FLOAT64
    if not trial.is_exact_dtype:
        bounds = compare.bounds_of(one, truth, None, trial.dtype)
    error = compare.worst_error(found, truth, bounds=bounds)
    _, row.error, row.of, row.bound = max(gather_over(trial.mesh, tuple(error)))
    return row


def _fewest(wrong: _Tried, alone: _Alone) -> dict[str, Any]:
    """Return the options that are left when each is taken away that the difference does not need."""
    left = dict(wrong.trial.options)
    for name in wrong.trial.options:
        fewer = {key: value for key, value in left.items() if key != name}
        trial = replace(wrong.trial, options=fewer)
        try:
            tried = _try(trial, wrong.row.batch, wrong.batch, alone)
        except RingspanError:  # an option that others need
            continue
        if not isinstance(tried, Row) and not tried.row.is_exact:
            left = fewer
    return left


def _find_place(wrong: _Tried) -> None:
    """Note in the row the first layer's output beyond the bound, or the first gradient if all outputs are right."""
    trial, batch = wrong.trial, wrong.batch
    place: compare.Place | None = None
    if trial.options.get("folds", 1) == 1 and not batch.is_tree:
        routes = wrong.truth.routes
        ring = steps.layers_on_ring(trial, batch, routes)
        truth = steps.layers_alone(trial, batch, torch.float64)
        one = None
        if not trial.is_exact_dtype:
            one = steps.layers_alone(trial, batch, routes=routes)
        place = compare.first_place(ring, truth, batch, one, trial.dtype)
    if place is None:
        place = compare.first_gradient(wrong.found, wrong.truth, wrong.bounds)
    found: Any = next(filter(None, gather_over(trial.mesh, place)), None)
    if found is None:
        return
    wrong.row.place = str(found)
    if found.wrong:
        wrong.row.wrong = [[*row] for row in found.wrong]
        wrong.row.tokens = batch.inputs["input_ids"].shape[1]


def _versions(mesh: DeviceMesh) -> dict[str, str]:
    """Return the releases that compute, which are the same on all ranks; PeerMismatch names those that differ."""
    here = {
        "ringspan": version("ringspan"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    everywhere = gather_over(mesh, here)
    for name, first in everywhere[0].items():
        for rank, found in enumerate(everywhere):
            if found[name] != first:
                raise PeerMismatch(
                    f"rank {rank} has {name} {found[name]}, and rank 0 has {first}; install the same on all hosts"
                )
    return here


def _dtypes_of(
    mesh: DeviceMesh, asked: Asked, is_packed: bool
) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Return the dtypes to try: float64 on CPUs, on other devices float32 and the training's, unless some are given.

    Packed weights are multiplied in float32 at most.
    """
    if is_packed:
        if any(dtype == torch.float64 for dtype, _ in asked.dtypes):
            raise ConfigError(
                "dtype=float64: packed weights are multiplied in narrower dtypes; use float32 or bfloat16"
            )
        # Their layers are loaded in the dtype that they compute in.
        given = tuple((dtype, dtype) for dtype, _ in asked.dtypes)
        return given or ((torch.float32, torch.float32),)
    if asked.dtypes:
        return asked.dtypes
    if mesh.device_type == "cpu":
        return ((torch.float64, torch.float64),)
    plain = ((torch.float32, torch.float32),)
    return plain + tuple(pair for pair in asked.trained if pair not in plain)


def _own_weights(
    mesh: DeviceMesh,
    asked: Asked,
    kept: tuple[int, ...],
    numbers: int,
) -> OwnWeights:
    """Return a folder's weights for the layers ``kept``; ConfigError if they do not fit the hosts' memory."""
    folder, option = str(asked.weights), f"weights={asked.weights!r}"
    # One process computes in float64 whatever the dtype, for the distance.
    refuse_too_large(mesh, numbers, option)
    if _packed(asked.config) is not None:
        raise UnsupportedError(
            f"{option}: its files are packed, and a proof packs random weights; leave weights out"
        )
    return OwnWeights(folder, asked.config, kept)


def _packed(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return a config's quantisation as values, if its weights are packed."""
    found: Any = getattr(config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


def _untried_of(asked: Asked) -> Iterator[str]:
    """Yield switches of a model that its small one does not have."""
    text = text_config(asked.config)
    implementation = text._attn_implementation
    is_ring = implementation is not None and implementation.startswith("ringspan")
    if implementation != plain_of(implementation) and not is_ring:
        yield f"attn_implementation={implementation} (one process computes with eager)"
    if getattr(text, "output_router_logits", False):
        yield "output_router_logits=True (the routers' auxiliary loss)"
    if dropout := getattr(asked.adapter, "lora_dropout", 0.0):
        yield f"lora_dropout={dropout}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as values of JSON."""
    return {
        name: _name(value) if isinstance(value, torch.dtype) else value
        for name, value in options.items()
    }


def prove(
    model: nn.Module | PreTrainedConfig,
    mesh: DeviceMesh | None = None,
    *,
    adapter: Any = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    tree: bool = False,
    **options: Any,
) -> Proof:
    """Prove that a model like this one is exact on a mesh with some options; every rank calls it.

    A small model with a layer of each kind, random weights and float64 takes two optimizer steps on several batches, on
    the mesh and by plain transformers on one process: see ``Proof``, whose ``is_exact`` is the verdict.

    Args:
        model: a model of transformers or PEFT, whose config and adapter count and not its weights, or a config.
        mesh: as for ``parallelize``; a ring of all ranks if None.
        adapter: a config of PEFT, for an adapter that trains in place of the weights.
        dtype: that layers compute in, such as ``torch.bfloat16``; float64 on CPUs and float32 on other devices if None.
        weights: a folder, whose own weights are tried: a layer of each kind in full width.
        tree: try a tree of rows with one beginning too (``shared_prefix``).
        options: of ``parallelize``, and ``accumulation_steps`` and ``clip_grad_norm`` of an optimizer step.

    Raises:
        UnsupportedError, ConfigError, LayoutError: on every rank, a model or options that ``parallelize`` refuses.
        PeerMismatch: ranks with other releases of what computes.
    """
    asked = asked_of(
        model,
        options=options,
        adapter=adapter,
        dtypes=dtypes_named(dtype),
        weights=weights,
        tree=tree,
    )
    return prove_on(init_mesh() if mesh is None else mesh, asked)


def asked_of(
    model: nn.Module | PreTrainedConfig, *, adapter: Any = None, **others: Any
) -> Asked:
    """Return the question of a model or a config: its adapter's config too, and its head, which a trial lacks."""
    name, not_tried = type(model).__name__, list[str]()
    if isinstance(model, PreTrainedConfig):
        config = model
    else:
        base = base_of(model)
        config, name = base.config, class_name(base)
        if is_peft(model) and adapter is None:
            adapter = next(iter(model.peft_config.values()))
        if not name.endswith(
            ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        ):
            not_tried.append(f"the head of {name}: a trial has a language model's")
    return Asked(
        config=config,
        name=name,
        adapter=adapter,
        not_tried=tuple(not_tried),
        **others,
    )


def dtypes_named(
    dtype: torch.dtype | None, parameters: torch.dtype | None = None
) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Pair the dtype of layers with a dtype of weights, by default float32 for narrower ones; ConfigError."""
    if dtype is None:
        return ()
    known = torch.float64, torch.float32, torch.bfloat16
    if dtype not in known:
        raise ConfigError(
            f"dtype={dtype}: a proof knows {', '.join(map(_name, known))}; use one of them"
        )
    if dtype.itemsize < 4:
        return ((dtype, parameters or torch.float32),)
    return ((dtype, dtype),)
