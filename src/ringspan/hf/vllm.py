"""TRL's generation by vLLM for a model that is split over rings: in a server, or on the model's own ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ringspan.core.errors import ConfigError
from ringspan.hf.config import RingConfig
from ringspan.hf.routes import KeptRoutes
from ringspan.hf.vllm_client import (
    RingVLLMClient,
    answering,
    folder_in,
    replaced,
)
from ringspan.torch.engine.transport.collectives import gather, gather_over
from ringspan.torch.model.adapters import base_of, is_peft
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.named_weights import NamedWeights, named_weights

_SENDING: Final = "handing weights to vLLM"
_ASKING: Final = "completions of vLLM"
_STARTING: Final = "starting vLLM"


class RingVLLMGeneration(VLLMGeneration):
    """TRL's generation by vLLM whose processes are rings: weights come from shards, and each replica asks once."""

    def __init__(self, *args: Any, ring: RingConfig, **kwargs: Any) -> None:
        model = kwargs["model"] if "model" in kwargs else args[0]
        base: Any = base_of(model)
        self.ring, self.ring_mesh = ring, base.ring_mesh
        self._weights: NamedWeights | None = None
        # Routes of what vLLM wrote; None if the trainer replays none.
        self.ring_kept_routes: KeptRoutes | None = None
        super().__init__(*args, **kwargs)

    @property
    def is_first(self) -> bool:
        """True on the rank that speaks to the server."""
        return dist.get_rank() == int(self.ring_mesh.mesh.min())

    @property
    def _replays(self) -> bool:
        """True if the trainer replays the routes that vLLM returns."""
        return self.ring.replay_routes == "rollout"

    def sync_weights(self) -> None:
        """Hand the model's weights over; every rank calls it, and an error of one raises on all."""
        if self.mode == "colocate":
            self._reload()
        elif self.ring.vllm_adapter_only:
            self._leave_adapter()
        elif self.ring.vllm_weights_folder is not None:
            self._leave_weights()
        else:
            self._send_weights()

    def generate(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """Return completions of this replica's prompts; every rank calls it, with the prompts of its ring."""
        ask = self._ask_server if self.mode == "server" else self._ask_engine
        return ask(prompts, images, num_generations, profiler)

    # A server

    def _weights_of(self, **options: Any) -> NamedWeights:
        # One object serves all updates; PEFT takes a second to plan.
        if self._weights is None:
            weights = named_weights(self.model, **options)
            base: Any = base_of(self.model)
            shared = set(getattr(base, "all_tied_weights_keys", None) or ())
            if parted := sorted(shared & {each.name for each in weights.metadata()}):
                raise ConfigError(
                    f"the adapter gives {parted[0]} a weight of its own, which vLLM takes from the embedding; leave "
                    "head and embedding out of target_modules"
                )
            self._weights = weights
        return self._weights

    def _send_weights(self) -> None:
        weights = self._weights_of()

        def send(tensors: Iterator[tuple[str, Tensor]]) -> None:
            self.vllm_client.send(weights.metadata(), tensors)

        self._hand(weights, send if self.is_first else None)

    def _hand(
        self,
        weights: NamedWeights,
        take: Callable[[Iterator[tuple[str, Tensor]]], None] | None,
    ) -> None:
        """Let ``take`` read the weights; a rank where it fails reads on, since the others wait for its parts."""
        tensors = iter(weights)
        error: Exception | None = None
        if take is not None:
            try:
                take(tensors)
            except Exception as raised:  # whatever it is, the others read on
                error = raised
        for _ in tensors:
            pass
        with in_call(_SENDING), meeting(self.ring_mesh, _SENDING):
            if error is not None:
                raise error

    def _leave_weights(self) -> None:
        weights = self._weights_of()
        with ExitStack() as stack:
            folder = self._folder(stack)
            weights.write(folder)
            told = weights.metadata()
            self._take(folder, lambda path: self.vllm_client.load(path, told))

    def _leave_adapter(self) -> None:
        told = self._weights_of(only="adapter").metadata()
        with ExitStack() as stack:
            folder = self._folder(stack)
            self.model.save_pretrained(str(folder or "."))
            self._take(folder, lambda path: self.vllm_client.load_adapter(path, told))

    def _folder(self, stack: ExitStack) -> Path | None:
        """Return a new folder on the first rank, which goes with ``stack``."""
        with meeting(self.ring_mesh, _SENDING):
            if self.is_first:
                return stack.enter_context(
                    folder_in(str(self.ring.vllm_weights_folder))
                )
        return None

    def _take(self, folder: Path | None, load: Callable[[Path], None]) -> None:
        with in_call(_SENDING), meeting(self.ring_mesh, _SENDING):
            if folder is not None:
                load(folder)

    def _ask_server(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any
    ) -> tuple[Any, ...]:
        """Ask once for all replicas' prompts, on the first rank."""
        with in_call(_ASKING):
            asked = gather((prompts, images), self.ring_mesh.get_group("replicate"))
            result: Any = None
            with meeting(self.ring_mesh, _ASKING):
                if self.is_first:
                    result = self._ask_for(asked, num_generations, profiler)
            result = gather_over(self.ring_mesh, result)[0]
        place = self.ring_mesh.get_local_rank("replicate")
        start = sum(len(one) for one, _ in asked[:place])
        mine = slice(start, start + len(prompts))
        columns = tuple(
            None if column is None else column[mine] for column in result[:-1]
        )
        routes = result[-1]
        if routes is not None and self.ring_kept_routes is not None:
            self._keep(columns[0], columns[1], routes[mine])
        return columns

    def _keep(self, prompts: Any, completions: Any, routes: Any) -> None:
        """Keep the routes of this replica's rows for the passes that train on them."""
        assert self.ring_kept_routes is not None
        for prompt, completion, each in zip(prompts, completions, routes, strict=True):
            self.ring_kept_routes.keep([*prompt, *completion], each)

    def _ask_for(
        self, asked: list[Any], num_generations: int, profiler: Any
    ) -> tuple[Any, ...]:
        prompts = [prompt for one, _ in asked for prompt in one]
        images = [image for one, found in asked for image in found or [None] * len(one)]
        client = self.vllm_client
        with self._as_one_process(), answering(client.base_url):
            columns = super().generate(prompts, images, num_generations, profiler)
        return (*columns, client.routes if client.with_routes else None)

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """Let TRL's code run on this rank alone, with all prompts: its gathers and broadcasts return what they get."""
        several, self.accelerator = (
            self.accelerator,
            SimpleNamespace(is_main_process=True, process_index=0, num_processes=1),
        )
        try:
            with replaced(
                vllm_generation,
                gather_object=lambda things: things,
                broadcast_object_list=lambda things, **_: things,
            ):
                yield
        finally:
            self.accelerator = several

    # An engine on the ranks of a ring

    def _reload(self) -> None:
        def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
            if self.enable_sleep_mode:
                vllm_generation.empty_cache()
                self.llm.wake_up(tags=["weights"])
                self._llm_weights_sleeping = False
            # Layer by layer: load_weights() of the model is wrong where kernels keep weights of their own (CPUs, fp8).
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": tensors}
            )
            self.llm.reset_prefix_cache()

        self._hand(self._weights_of(everywhere=True), load)

    def _ask_engine(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any
    ) -> tuple[Any, ...]:
        """Share a ring's prompts among its engines, and return all completions."""
        share = -(-len(prompts) // self._num_engines)
        part = slice(self._engine * share, (self._engine + 1) * share)
        found: Any = None
        with in_call(_ASKING), meeting(self.ring_mesh, _ASKING):
            with self._answers() as answers:
                columns = super().generate(
                    prompts[part], images and images[part], num_generations, profiler
                )
            found = (*columns, self._routes_of(answers))
        with in_call(_ASKING):
            by_rank = gather_over(self.ring_mesh, found, _axes_of_ring(self.ring_mesh))
        by_engine = by_rank[:: len(by_rank) // self._num_engines]
        *columns, routes = (
            None if parts[0] is None else list(chain.from_iterable(parts))
            for parts in zip(*by_engine, strict=True)
        )
        if routes is not None:
            self._keep(columns[0], columns[1], routes)
        return tuple(columns)

    @contextmanager
    def _answers(self) -> Iterator[list[Any]]:
        """Yield a list that takes the engine's answers: TRL hands on only their tokens and log-probabilities."""
        answers: list[Any] = []
        ask = self.llm.generate

        def recorded(*given: Any, **named: Any) -> Any:
            found = ask(*given, **named)
            answers.extend(found)
            return found

        self.llm.generate = recorded
        try:
            yield answers
        finally:
            del self.llm.generate

    def _routes_of(self, answers: list[Any]) -> list[Tensor] | None:
        """Return the routes (tokens, layers, K) of an engine's answers; None if the trainer replays none."""
        if not self._replays:
            return None
        found = [one.routed_experts for answer in answers for one in answer.outputs]
        if any(routes is None for routes in found):
            raise ConfigError(
                "this vLLM returns no routes of its experts; update it, or set replay_routes='old'"
            )
        return [torch.from_numpy(routes.astype(np.int16)) for routes in found]

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._connect()
        else:
            self._start_engines()

    def _connect(self) -> None:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        vocabulary = base_of(self.model).config.get_text_config().vocab_size
        folder = self.ring.vllm_weights_folder
        with in_call("reaching vLLM"), meeting(self.ring_mesh, "reaching vLLM"):
            if self.ring.vllm_adapter_only and not is_peft(self.model):
                raise ConfigError(
                    "vllm_adapter_only=True for a model without an adapter; leave it out, or give a peft_config"
                )
            if self.is_first:
                client = RingVLLMClient(
                    url,
                    self.group_port,
                    self.server_timeout,
                    folder,
                    with_routes=self._replays,
                )
                client.prepare(self.accelerator.device, vocabulary)
                self.vllm_client = client

    def _start_engines(self) -> None:
        """Start vLLM on every rank: engines of ``tensor_parallel_size`` ranks of a ring each.

        vLLM and TRL count ranks here, while the trainer's accelerator counts rings. An engine that does not start is
        named on all ranks, in place of TRL's barrier, which they would never leave.
        """
        mesh, size = self.ring_mesh, self.tensor_parallel_size
        ring = next(one for one in rings_of(mesh, size) if dist.get_rank() in one)
        self._num_engines = len(ring) // size
        self._engine = ring.index(dist.get_rank()) // size
        counting, trained = self.accelerator, self.model
        self.accelerator = SimpleNamespace(
            num_processes=dist.get_world_size(),
            process_index=dist.get_rank(),
            local_process_index=counting.local_process_index,
            wait_for_everyone=lambda: None,
        )
        # Without modules: for packed ones TRL would have vLLM pack its own weights, and ours come unpacked.
        self.model = SimpleNamespace(
            name_or_path=trained.name_or_path, named_modules=lambda: ()
        )
        try:
            with in_call(_STARTING), meeting(mesh, _STARTING):
                self._refuse_packed_files(trained)
                with self._with_routes(trained):
                    super()._init_vllm()
        finally:
            self.accelerator, self.model = counting, trained
            # The ranks of an engine have equal prompts, so that TRL has none to gather.
            self.tensor_parallel_size = 1

    def _with_routes(self, trained: Any) -> AbstractContextManager[None]:
        """Let TRL start an engine that returns its routes, if the trainer replays them."""
        base: Any = base_of(trained)
        engine = getattr(vllm_generation, "LLM", None)
        # Without vLLM TRL says what is missing.
        if not self._replays or not base.ring_experts or engine is None:
            return nullcontext()
        engine = partial(engine, enable_return_routed_experts=True)
        return replaced(vllm_generation, LLM=engine)

    def _refuse_packed_files(self, model: Any) -> None:
        quantizer = getattr(base_of(model), "hf_quantizer", None)
        if quantizer is not None and quantizer.pre_quantized:
            raise ConfigError(
                f"{model.name_or_path} has packed weights, and an engine of vllm_mode='colocate' is handed plain ones; "
                "load an unpacked folder with quantization_config"
            )


def rings_of(mesh: DeviceMesh, engine_ranks: int) -> list[list[int]]:
    """Return the ranks of each ring, in the order that engines of ``engine_ranks`` take them.

    Raises:
        ConfigError: engines of that size do not come out even, or one would have ranks of two rings.
    """
    axis = list(mesh.mesh_dim_names or ()).index("replicate")
    rings = mesh.mesh.movedim(axis, 0).flatten(1).tolist()
    if len(rings[0]) % engine_ranks:
        raise ConfigError(
            f"vllm_tensor_parallel_size={engine_ranks} does not divide the {len(rings[0])} ranks of a ring; change it"
        )
    # vLLM gives an engine neighbouring ranks of the world.
    for ring in rings:
        for start in range(0, len(ring), engine_ranks):
            first = ring[start]
            if first % engine_ranks or ring[start : start + engine_ranks] != list(
                range(first, first + engine_ranks)
            ):
                raise ConfigError(
                    f"vllm_tensor_parallel_size={engine_ranks} takes neighbouring ranks, and a ring has {ring}; make "
                    "replicate the first axis of the mesh, or set it to 1"
                )
    return rings


def _axes_of_ring(mesh: DeviceMesh) -> list[str]:
    """Return the axes of a ring's ranks, from the innermost, so that a gather over them keeps the order of ranks."""
    return [name for name in reversed(mesh.mesh_dim_names or ()) if name != "replicate"]
