"""A few training steps of a draw, on one process of plain transformers and on the ranks of a mesh."""

from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ringspan as rs
from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.state import random_state, restore, run_state
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.memory import offload
from ringspan.torch.model.memory.adamw import own_state
from ringspan.torch.model.weights.shards import join_slices
from tests.combinations.batches import (
    VOCABULARY,
    Batch,
    batch_of,
    log_probabilities,
    summed_loss,
)
from tests.combinations.tables import Draw, options_of, value
from tests.every_model.hybrids import HYBRIDS, INDEXED
from tests.torch.engine.recurrence.models import build as build_hybrid
from tests.torch.model.test_peft import stir
from tests.torch.models import build, whole, whole_gradients

STEPS: Final = 2
# Of a prompt, read in chunks of so many tokens of each rank, of which two are long enough to be split over the ring.
_PROMPT, _READ_AT_ONCE, _WRITTEN = 75, 17, 4
_OTHER, _EVALUATED = 5, 9  # numbers of batches beside those of the steps
# Routers, whose results are several, and what Mamba's own code computes with: PEFT does not adapt them.
_NOT_ADAPTED: Final = r".*\.(router|gate|out_proj|conv1d)(\..*)?"
_DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.float32,
}


class Refused(NamedTuple):
    """What a rank raised, and how many exchanges it had posted in that call."""

    kind: str
    message: str
    posts: int


class Found(NamedTuple):
    """What a run computed, in order."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    norms: list[Tensor]
    events: list[
        tuple[int, Tensor]
    ]  # each with the number of the replica that computed it
    weights: dict[str, Tensor]

    def followed_by(self, other: "Found") -> "Found":
        """The results of a run that was stopped and resumed."""
        return Found(
            self.losses + other.losses, self.gradients, self.norms + other.norms, self.events + other.events,
            other.weights,
        )  # fmt: skip


def prepare(draw: Draw, folder: Path) -> None:
    """Write what the runs of a draw read: weights that are packed as they are read."""
    if draw["trains"] == "QLoRA":
        build(value(draw, "family").kind).save_pretrained(folder)


def base_of(draw: Draw, folder: Path, dtype: torch.dtype) -> Any:
    """The model of a draw before what is trained of it is chosen."""
    family, changes = value(draw, "family"), dict(value(draw, "family").changes)
    if value(draw, "mesh").tp > 1:
        names = [
            "vocab_size",
            *(["vocab_size_per_layer_input"] if family.kind == "gemma4_text" else []),
        ]
        changes |= dict.fromkeys(names, 98)  # which two ranks can split
    if family.kind in HYBRIDS | INDEXED and family.kind != "glm_moe_dsa":
        return build_hybrid(family.kind, dtype, **changes)
    if draw["trains"] == "QLoRA":
        packing = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        options: dict[str, Any] = {
            "quantization_config": packing,
            "device_map": "cpu",
            "attn_implementation": "sdpa",
        }
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )
        for module in model.modules():
            # In evaluation it would compute in bfloat16 on some processors.
            vars(module)["support_avx512bf16_for_cpu"] = False
        return model
    model = build(family.kind, **changes)
    model = in_float64_of(model) if dtype == torch.float64 else model.to(dtype)
    if dtype == torch.float64 or "experts" in family.traits:
        model.set_experts_implementation("eager")  # the others know no float64
    return model


def model_of(draw: Draw, folder: Path, dtype: torch.dtype) -> Any:
    model, trains = base_of(draw, folder, dtype), draw["trains"]
    if trains == "a part":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                "norm" in name or "layers.1" in name or ".h.1" in name
            )
    elif trains != "all":
        torch.manual_seed(1)
        adapter = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules="all-linear", use_dora=trains == "DoRA",
            exclude_modules=_NOT_ADAPTED,
        )  # fmt: skip
        packed = trains == "QLoRA"
        model = stir(get_peft_model(model, adapter))
        model = model if packed else model.to(dtype)
        if trains == "LoRA and norms":
            for name, parameter in model.named_parameters():
                if "norm" in name and parameter.is_floating_point():
                    parameter.requires_grad_(True)
    # No token ends a text, and none of a prompt is padding. Some models compute with the token that the config has for
    # the end of a text, so that one stays.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = model.config.pad_token_id = 0
    return model.train()


class Way(Protocol):
    """How a model of a draw computes what is asked of all replicas' batches."""

    model: Any
    replica: int

    def loss(self, numbers: tuple[int, int], count: float | None) -> Tensor: ...

    def log_probabilities(self, numbers: tuple[int, int]) -> Tensor: ...

    def generate(self, **asked: Any) -> Tensor: ...


class OneProcess:
    def __init__(self, draw: Draw, folder: Path, dtype: torch.dtype) -> None:
        self.draw, self.model, self.replica = draw, model_of(draw, folder, dtype), 0

    def loss(self, numbers: tuple[int, int], count: float | None) -> Tensor:
        of_training = (value(self.draw, "z_loss"), value(self.draw, "label_smoothing"))
        total: Any = 0.0
        for batch in batches(self.draw, numbers):
            total = total + summed_loss(
                self.model, batch, *(of_training if self.model.training else ())
            )
        # Without any target the loss is 0 on a ring, where transformers' mean is NaN.
        return total / max(count or count_of(self.draw, numbers), 1)

    def log_probabilities(self, numbers: tuple[int, int]) -> Tensor:
        """(replicas, rows, tokens)"""
        return torch.stack(
            [
                log_probabilities(self.model, batch)
                for batch in batches(self.draw, numbers)
            ]
        )

    def generate(self, **asked: Any) -> Tensor:
        return self.model.generate(**asked)


class OnRing:
    def __init__(self, draw: Draw, folder: Path, mesh: DeviceMesh) -> None:
        self._draw, self._mesh, self.posts = draw, mesh, COUNTERS.num_posts
        self.replica = mesh["replicate"].get_local_rank()
        options = options_of(draw)
        if draw["dtype"] == "bfloat16":
            options["compute_dtype"] = torch.bfloat16
        self.model: Any = rs.parallelize(
            model_of(draw, folder, _DTYPES[draw["dtype"]]), mesh, **options
        )
        for module in self.model.modules():
            if hasattr(module, "ring_prefill_tokens"):
                module.ring_prefill_tokens = _READ_AT_ONCE

    def _local(self, numbers: tuple[int, int]) -> dict[str, Any]:
        self.posts = COUNTERS.num_posts
        options = options_of(self._draw)
        batch = batches(self._draw, numbers)[self.replica]
        prefix_loss: Any = batch.prefix_loss
        split = {
            "layout": options["layout"],
            "folds": options["folds"],
            "prefix_loss": prefix_loss,
        }
        return rs.shard_batch(batch.whole, self._mesh, **split)

    def loss(self, numbers: tuple[int, int], count: float | None) -> Tensor:
        counted = {} if count is None else {"num_items_in_batch": round(count)}
        return self.model(**self._local(numbers), **counted).loss

    def log_probabilities(self, numbers: tuple[int, int]) -> Tensor:
        """(rows, tokens) of its own replica"""
        with torch.no_grad():
            return rs.token_logprobs(self.model, self._local(numbers))

    def generate(self, **asked: Any) -> Tensor:
        self.posts = COUNTERS.num_posts
        return self.model.generate(**asked)


def batches(draw: Draw, numbers: tuple[int, int]) -> list[Batch]:
    """The batch of each replica."""
    form, length, few = draw["data"], value(draw, "length"), value(draw, "labels")
    return [
        batch_of(form, length, few, *numbers, replica)
        for replica in range(value(draw, "mesh").replicate)
    ]


def count_of(draw: Draw, *parts: tuple[int, int]) -> float:
    return sum(
        batch.num_targets for numbers in parts for batch in batches(draw, numbers)
    )


def optimizer_of(draw: Draw, model: Any) -> torch.optim.Optimizer:
    parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    if draw["optimizer"] == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1)


def happen(way: Way, draw: Draw, event: str) -> list[Tensor]:
    """Do what comes between two steps, or between a pass and its backward pass; what it computes."""
    model = way.model
    match event:
        case "evaluation":
            model.eval()
            with torch.no_grad():
                loss = way.loss((_EVALUATED, 0), None)
            model.train()
            return [loss]
        case "log-probabilities":
            return [way.log_probabilities((_EVALUATED, 0))]
        case "generation":
            model.eval()
            generator = torch.Generator().manual_seed(4)
            ids = torch.randint(3, VOCABULARY, (1, _PROMPT), generator=generator)
            asked = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": _WRITTEN,
                "do_sample": False,
            }
            written = way.generate(input_ids=ids, **asked)
            model.train()
            return [written]
        case "a pass":
            return [way.loss((_OTHER, 0), None).detach()]
    return []


def train(
    way: Way, draw: Draw, optimizer: torch.optim.Optimizer, steps: range
) -> Found:
    """Train some steps, each of one batch or of several."""
    found = Found([], {}, [], [], {})
    trained = [
        parameter for parameter in way.model.parameters() if parameter.requires_grad
    ]
    for step in steps:
        if step > 0:
            found.events.extend(
                (way.replica, result) for result in happen(way, draw, draw["between"])
            )
        parts = [(step, part) for part in range(value(draw, "accumulate"))]
        count = count_of(draw, *parts) if len(parts) > 1 else None
        for numbers in parts:
            loss = way.loss(numbers, count)
            if draw["inside"] == "a second loss":
                loss = loss + way.loss((_OTHER, numbers[1]), None)
            found.events.extend(
                (way.replica, result) for result in happen(way, draw, draw["inside"])
            )
            loss.backward()
            found.losses.append(loss.detach())
        if step == 0:
            gradients = {
                name: gradient
                for name, gradient in join_slices(whole_gradients(way.model)).items()
                if gradient is not None
            }
            found.gradients.update(
                (name, gradient.clone()) for name, gradient in gradients.items()
            )
        if (most := value(draw, "clip")) is not None:
            norm = torch.nn.utils.clip_grad_norm_(trained, most)
            found.norms.append(whole(norm).detach())
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        name: whole(p.detach()).clone()
        for name, p in way.model.named_parameters()
        if p.requires_grad
    }
    found.weights.update(join_slices(weights))
    return found


def on_one_process(draw: Draw, then: Draw, folder: Path, dtype: torch.dtype) -> Found:
    """Train; the second step has the batches of ``then``, whose mesh may have other replicas."""
    way = OneProcess(draw, folder, dtype)
    optimizer = optimizer_of(draw, way.model)
    first = train(way, draw, optimizer, range(1))
    way.draw = then
    return first.followed_by(train(way, then, optimizer, range(1, STEPS)))


def on_ring(
    mesh: DeviceMesh, draw: Draw, folder: Path, steps: range = range(STEPS)
) -> Found | Refused:
    """Train on a rank; some of the steps where a run is stopped and resumed."""
    way, before = None, COUNTERS.num_posts
    try:
        with mock.patch.object(offload, "MIN_BYTES", 0):  # whatever its size
            way = OnRing(draw, folder, mesh)
            optimizer = optimizer_of(draw, way.model)
            if len(steps) == STEPS:
                return train(way, draw, optimizer, steps)
            return _train_apart(way, draw, optimizer, steps, folder)
    except rs.RingspanError as error:
        began = before if way is None else way.posts
        return Refused(type(error).__name__, str(error), COUNTERS.num_posts - began)


def _train_apart(
    way: OnRing, draw: Draw, optimizer: Any, steps: range, folder: Path
) -> Found:
    """Train the first step and save, or read what was saved, with other weights in place, and train the second."""
    checkpoints, device = (
        Checkpoints(folder / "run", run_id="a", keep=2, asynchronous=False),
        torch.device("cpu"),
    )
    if steps.start > 0:
        saved = checkpoints.find()
        assert saved.folder is not None
        assert saved.manifest is not None
        with torch.no_grad():
            for parameter in way.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1.0)
        restore(checkpoints, saved.folder, saved.manifest, way.model, optimizer, device)
    found = train(way, draw, optimizer, steps)
    if steps.start == 0:
        own = random_state(device) | own_state(optimizer)
        failure = checkpoints.save(
            1, run_state(way.model, optimizer), own, {}, mesh={}, layout=draw["layout"]
        )
        assert failure is None, failure
    checkpoints.close()
    return found
