"""transformers' ``generate`` on a ring: whole prompt in, whole text out on every rank, by the first one's logits."""

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringspan.core.arguments import PREFILL_TOKENS
from ringspan.core.errors import UnsupportedError
from ringspan.core.names import CacheDtypeName
from ringspan.torch.engine.transport.digest import described
from ringspan.torch.generate.agreed import first_ranks_numbers
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.generate.cache.identity import reader_of
from ringspan.torch.generate.cache.saved import load, save
from ringspan.torch.generate.options import agreed_options, cache_bytes
from ringspan.torch.generate.passes import CachePass, agreed_pass, over_cache, unchecked
from ringspan.torch.generate.weights import weights_for_tokens
from ringspan.torch.model.attention.own import uses_alibi
from ringspan.torch.model.consistency.calls import (
    Call,
    check_call,
    exchanging,
    preparing,
)
from ringspan.torch.model.consistency.fixed import calling_parts
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.layers.cache_names import cache_name, given_cache
from ringspan.torch.model.layers.decoder import cached_kinds, cached_states
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring
from ringspan.torch.model.memory.sharding import recovering_shards, settle
from ringspan.torch.model.recurrent import why_no_cache
from ringspan.torch.model.tasks.causal_lm import RingCausalLM
from ringspan.torch.runtime.mesh import text_groups


class CacheCost(NamedTuple):
    """Scores of one text over a cache in the model's precision and one in fewer bits."""

    loss: float
    """Mean negative log-probability of the scored tokens."""
    loss_then: float
    """Same loss over the other cache."""
    logits_error: float
    """Norm of the change of the last token's logits, by the norm of the logits."""
    cache_bytes: int
    """Bytes of this rank's share."""
    cache_bytes_then: int
    """Bytes of this rank's share of the other cache."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def perplexity_then(self) -> float:
        return math.exp(self.loss_then)


class RingGenerator(RingCausalLM):
    ring_is_generating = False
    ring_prefill_tokens = PREFILL_TOKENS
    # Called with the length of the cache after each chunk.
    ring_on_read: Callable[[int], None] | None = None

    @torch.compiler.disable(recursive=False)
    def __call__(self: Any, *args: object, **kwargs: object) -> Any:
        """Run a pass over a cache inside ``generate`` or given a ``RingCache``, otherwise one without a cache."""
        if not (self.ring_is_generating or isinstance(given_cache(kwargs), RingCache)):
            return super().__call__(*args, **kwargs)
        # Weights that FSDP gathers in inference mode could not be differentiated in a later pass.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        with in_call("generating"):
            asked = agreed_pass(self, RingGenerator.forward, args, kwargs)
            if not self.ring_is_generating:
                settle(self)
            try:
                with (
                    recovering_shards(self),
                    calling_parts("generating"),
                    exchanging(),
                    unchecked(self),
                    torch.no_grad(),
                ):
                    return nn.Module.__call__(self, ring_over_cache=asked)
            finally:
                if not self.ring_is_generating:
                    settle(self)

    @torch.compiler.disable(recursive=False)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RingCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        cache: RingCache | None = None,
        ring_over_cache: CachePass | None = None,
        **kwargs: Any,
    ) -> object:
        """Run ``RingCausalLM.forward``; over a cache, return the last new tokens' logits (B, n, V) on every rank."""
        # Its signature shows transformers' arguments, which ``generate`` and Trainer look for.
        if ring_over_cache is not None:
            return over_cache(self, ring_over_cache)
        given = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return super().forward(**given, attention_mask=attention_mask, **kwargs)

    def new_cache(self: Any, dtype: CacheDtypeName | None = None) -> RingCache:
        """Return an empty cache for ``generate``'s ``past_key_values`` over several turns.

        ``dtype`` of keys and values: the model's when None, ``float32``, ``bfloat16``, or ``fp8``, ``int8`` or ``int4``
        with a scale per head and 64 tokens.

        Raises:
            ConfigError: any other dtype.
            UnsupportedError: the model keeps states that a ring's cache does not (MiniMax, Zamba).
        """
        refuse_states(self)
        ring, config = self.ring_axis, self.get_submodule(self.ring_decoder).config
        states = cached_states(config) if self.ring_stateful else ()
        return RingCache(
            cached_kinds(config), ring.size(), ring.get_local_rank(), dtype, states
        )

    def save_cache(self: Any, cache: RingCache, folder: str | Path) -> None:
        """Write a cache into a new folder, so that its text need not be read again; on every rank.

        Raises:
            UnsupportedError: the cache is not of this model, empty, or incomplete after a failed pass.
            CheckpointError: the folder exists, or cannot be written.
            PeerMismatch: replicas hold different tokens.
        """
        with in_call("saving a cache"):
            save(self, cache, folder)

    def load_cache(
        self: Any, folder: str | Path, dtype: CacheDtypeName | None = None
    ) -> RingCache:
        """Load a cache from ``save_cache``, of any number of ranks, on every rank; ``cache.ids`` are its tokens.

        CheckpointError if a file is missing, damaged or cut, or the cache is another model's.
        """
        with in_call("loading a cache"):
            return load(self, folder, self.new_cache(dtype))

    @torch.no_grad()
    def cache_cost(
        self: Any, ids: Tensor, dtype: CacheDtypeName, scored: int = 256
    ) -> CacheCost:
        """Measure a cache dtype's cost by the loss of a text's (B, L) last ``scored`` tokens; on every rank."""
        if ids.ndim != 2 or not 1 <= scored <= ids.shape[1] - 2:
            raise UnsupportedError(
                f"scored={scored} of {tuple(ids.shape)} tokens: at least one must be read, one scored"
            )

        def over(cache: RingCache) -> tuple[float, Tensor]:
            self(
                ids[:, : -scored - 1],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = self(
                ids[:, -scored - 1 : -1], past_key_values=cache, use_cache=True
            ).logits.float()
            targets = ids[:, -scored:].flatten().to(logits.device)
            return float(F.cross_entropy(logits.flatten(0, 1), targets)), logits[:, -1]

        cache, other = self.new_cache(), self.new_cache(dtype)
        (loss, last), (loss_then, last_then) = over(cache), over(other)
        error = float((last_then - last).norm() / last.norm())
        return CacheCost(loss, loss_then, error, cache.nbytes, other.nbytes)

    @torch.no_grad()
    def generate(
        self: Any, *args: object, weights: str = "auto", **kwargs: object
    ) -> Any:
        """Run ``transformers.GenerationMixin.generate`` on every rank: whole prompt in, whole text out.

        In float32 the tokens equal one process's, by the first rank's random numbers and clock. Greedy, sampling,
        beams, assisted decoding, processors, streamers and ``past_key_values`` from ``new_cache()`` are transformers'
        own. Replicas may have their own prompts. ``weights``: ``whole`` on each rank, ``sharded`` and gathered for
        every token, or ``auto``, whole if they fit with the cache.

        Raises:
            UnsupportedError: a foreign cache, hidden states, embeddings for a prompt; padding or an assistant for
                layers with states; a model with its own cache for states.
            PeerMismatch: on every rank, if arguments differ between ranks or user code raised on another rank.
        """
        refuse_states(self)
        plain = super().generate  # pyright: ignore[reportAttributeAccessIssue]
        with in_call("generating"):
            arguments = agreed_options(self, plain, args, kwargs, weights)
        # An assistant model or a logits processor calls generate inside of generate.
        if self.ring_is_generating:
            return plain(**arguments)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.generate(**arguments, weights=weights)
        settle(self)
        cache = given_cache(arguments)
        reader = reader_of(self) if cache is None else cache.reader
        groups = text_groups(self.ring_mesh)
        with ExitStack() as stack:
            for name, value in (("ring_is_generating", True), ("ring_reader", reader)):
                stack.callback(vars(self).pop, name, None)
                vars(self)[name] = value
            stack.enter_context(calling_parts("generating"))
            stack.enter_context(
                weights_for_tokens(self, weights, cache_bytes(self, arguments))
            )
            stack.enter_context(first_ranks_numbers(groups, self.device))
            stack.enter_context(
                preparing(self.ring_mesh, "generate", between_replicas=False)
            )
            made = plain(**arguments)
            # Each pass compares the tokens chosen before it; no pass follows the last token.
            facts = {"chosen tokens": described(getattr(made, "sequences", made))}
            check_call(
                self.ring_mesh,
                Call("the end of generate", alike_in_ring=facts),
                between_replicas=False,
            )
            return made


def refuse_states(model: RingModel) -> None:
    """Raise UnsupportedError for a model without a cache, with ALiBi, or with other states."""
    decoder, reason = decoder_on_ring(model), None
    if cache_name(decoder) is None:
        reason = (
            "it keeps no cache, so that each token would need all of the text again"
        )
    elif uses_alibi(decoder):
        reason = (
            "its attention has ALiBi, which a pass over a cache does not compute yet"
        )
    elif model.ring_stateful:
        reason = why_no_cache(decoder)
    reason = reason or family_of(decoder.config).no_cache(decoder.config)
    if reason:
        raise UnsupportedError(
            f"{class_name(model)} does not generate on a ring: {reason}; save the model with save_pretrained and "
            "generate on one process"
        )


def _for_readers() -> inspect.Signature:
    """Return ``forward``'s parameters and those it hands on: Trainer keeps these data columns."""
    *own, rest = inspect.signature(RingGenerator.forward).parameters.values()
    known = {parameter.name for parameter in (*own, rest)}
    handed_on = (
        each
        for each in inspect.signature(RingCausalLM.forward).parameters.values()
        if each.name not in known
    )
    return inspect.Signature([*own, *handed_on, rest])


_forward: Any = RingGenerator.forward
_forward.__signature__ = _for_readers()
