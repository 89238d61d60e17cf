"""Choice of a mesh to generate on, against one device, with reasons."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.units import shown_bytes, shown_seconds
from ringspan.core.schedule.choice import WORTH_IT
from ringspan.plan.cluster.devices import Device
from ringspan.plan.generation.cost import (
    COLLECTIVE_SECONDS,
    Text,
    TextCost,
    text_bytes,
    text_cost,
)
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.search import MOST, check_sizes, divisors, largest


@dataclass(frozen=True, kw_only=True)
class TextQuestion:
    """``batch`` prompts of ``prompt`` tokens, answered at once with ``new_tokens`` each; raises for bad ones."""

    shape: ModelShape
    device: Device
    devices: int
    prompt: int
    new_tokens: int
    batch: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.shape.sees or self.shape.has_states:
            what = "images" if self.shape.sees else "states"
            raise UnsupportedError(
                f"--model {self.shape.name}: a plan of generation counts what is kept of tokens, not {what}; plan its "
                "training, without --generate"
            )
        if not self.device.memory_bandwidth:
            raise ConfigError(
                f"--device {self.device.name}: writing tokens takes what reading memory does; "
                "add memory_bandwidth=... (bytes/s) to it"
            )

    def fits(self, text: Text) -> bool:
        return sum(text_bytes(self.shape, text)) <= self.device.memory_bytes

    @property
    def alone(self) -> Text:
        return Text(
            prompt=self.prompt,
            new_tokens=self.new_tokens,
            batch=self.batch,
            dtype=self.dtype,
        )

    @cached_property
    def texts(self) -> tuple[Text, ...]:
        """Return every mesh of the devices, or of a part that divides them; few devices and whole weights first."""
        found: list[Text] = []
        for devices in divisors(self.devices):
            for tp in divisors(devices):
                if tp > self.device.devices_per_node or not self.shape.can_split(tp):
                    continue
                for replicate in divisors(devices // tp):
                    if self.batch % replicate == 0:
                        ring = devices // tp // replicate
                        one = replace(
                            self.alone,
                            ring=ring,
                            tp=tp,
                            replicate=replicate,
                            batch=self.batch // replicate,
                        )
                        found += (
                            [one, replace(one, weights="sharded")]
                            if ring > 1
                            else [one]
                        )
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    question: TextQuestion
    text: Text
    cost: TextCost
    alone: TextCost
    max_prompt: int

    @property
    def fits(self) -> bool:
        return self.question.fits(self.text)

    @property
    def positions(self) -> int | None:
        return self.question.shape.positions or self.question.shape.made_for or None

    @property
    def is_refused(self) -> bool:
        """True if ``ringspan generate`` refuses: the model has fewer positions."""
        return (
            self.positions is not None
            and self.question.prompt + self.question.new_tokens > self.positions
        )

    @property
    def alone_fits(self) -> bool:
        return self.question.fits(self.question.alone)

    @property
    def alone_is_better(self) -> bool:
        """True if one device holds the model and cache, and no mesh saves three percent of the time."""
        return self.alone_fits and self.text.devices == 1

    def as_json(self) -> dict[str, Any]:
        text, cost = self.text, self.cost
        return _as_json(cost, fits=self.fits) | {
            "mesh": {"replicate": text.replicate, "ring": text.ring, "tp": text.tp},
            "devices_used": text.devices,
            "weights": text.weights,
            "cache_bytes_per_rank": cost.cache_bytes,
            "seconds_per_token_parts": cost.token_parts,
            "collectives_per_token": cost.collectives_per_token,
            "max_prompt_tokens": self.max_prompt,
            "positions": self.positions,
            "one_device_is_better": self.alone_is_better,
            "one_device": _as_json(self.alone, fits=self.alone_fits),
            "reasons": list(self.reasons()),
        }

    def reasons(self) -> Iterator[str]:
        """Yield a sentence each: positions, number of devices, weights, a token's cost, reading's."""
        if self.is_refused:
            yield self._about_positions()
        yield from self._about_one_device()
        yield from self._about_weights()
        yield from self._about_tokens()
        yield from self._about_reading()
        if self.question.device.note:
            yield self.question.device.note

    def _about_positions(self) -> str:
        shape, tokens = (
            self.question.shape,
            self.question.prompt + self.question.new_tokens,
        )
        if shape.positions:
            return f"{shape.name} has {shape.positions:,} learned positions: generate raises for {tokens:,} tokens"
        return (
            f"{shape.name} was made for {shape.made_for:,} positions: ringspan generate refuses {tokens:,} tokens "
            "until its rotary positions are scaled (rope_parameters and max_position_embeddings in config.json); plan "
            "with that config.json"
        )

    def _about_one_device(self) -> Iterator[str]:
        """Yield whether one device would hold the model and cache, and whether it would be quicker."""
        alone, cost, title = self.alone, self.cost, self.question.device.title
        if not self.alone_fits:
            yield (
                f"one {title} does not hold it: {shown_bytes(alone.weight_bytes)} of weights, "
                f"{shown_bytes(alone.cache_bytes)} of cache and {shown_bytes(alone.work_bytes)} for a chunk of the "
                f"prompt are more than {shown_bytes(self.question.device.memory_bytes)}"
            )
        elif self.alone_is_better:
            others = (
                text
                for text in self.question.texts
                if text.devices > 1 and self.question.fits(text)
            )
            if next(others, None) is not None:
                yield (
                    f"one {title} would be the better choice: it holds weights and cache, and no mesh of these devices "
                    "is predicted to save three percent of the time"
                )
            else:
                yield f"one {title} holds weights and cache; there is nothing to send"
        else:
            yield (
                f"one {title} would hold it too: {shown_seconds(alone.first_token_seconds)} to the first token and "
                f"{shown_seconds(alone.token_seconds)} a token, {shown_seconds(alone.seconds)} in all; these "
                f"{self.text.devices} take {shown_seconds(cost.seconds)}"
            )

    def _about_weights(self) -> Iterator[str]:
        text, whole = self.text, replace(self.text, weights="whole")
        if text.ring == 1:
            return
        need = shown_bytes(sum(text_bytes(self.question.shape, whole)))
        if text.weights == "sharded":
            yield f"weights are gathered for every token: whole on each rank they would need {need}"
        else:
            yield f"weights stay whole on each rank of the ring, besides their shards: {need} in all with the cache"

    def _about_tokens(self) -> Iterator[str]:
        """Yield the parts of a token's time, and the collective at which one device would be as fast."""
        text, cost, parts = self.text, self.cost, self.cost.token_parts
        told = f"{shown_seconds(parts['weights'])} for the weights, {shown_seconds(parts['cache'])} for the cache"
        if not cost.collectives_per_token:
            yield f"a token is bound by memory that is read: {told}"
            return
        yield (
            f"a token takes {told} and {shown_seconds(parts['sent'])} for {cost.collectives_per_token} collectives, "
            f"each of which is assumed to take {shown_seconds(COLLECTIVE_SECONDS[True])} in a node and "
            f"{shown_seconds(COLLECTIVE_SECONDS[False])} between nodes, in addition to its bytes"
        )
        sent = parts["sent"] / cost.collectives_per_token
        spare = (
            self.alone.token_seconds - cost.token_seconds
        ) / cost.collectives_per_token + sent
        if self.alone_fits and text.replicate == 1:
            if spare > 0:
                yield f"one device would write as fast if a collective took {shown_seconds(spare)}"
            else:
                yield "one device would write faster however fast a collective is"

    def _about_reading(self) -> Iterator[str]:
        cost = self.cost
        if cost.exposed_seconds > 0.05 * cost.first_token_seconds:
            share = cost.exposed_seconds / cost.first_token_seconds
            yield f"{share:.0%} of the time to the first token waits for links"


def _as_json(cost: TextCost, *, fits: bool) -> dict[str, Any]:
    return {
        "fits": fits,
        "bytes": {
            "weights": cost.weight_bytes,
            "cache": cost.cache_bytes,
            "chunk": cost.work_bytes,
        },
        "peak_bytes": cost.peak_bytes,
        "first_token_seconds": cost.first_token_seconds,
        "seconds_per_token": cost.token_seconds,
        "seconds": cost.seconds,
    }


def plan_text(question: TextQuestion) -> TextPlan:
    """Return the mesh with the fewest devices within 3% of the quickest; if no mesh fits, the most frugal one."""
    holding = [text for text in question.texts if question.fits(text)]
    # Gather weights for each token only on meshes that do not hold them whole.
    whole = {
        (text.replicate, text.ring, text.tp)
        for text in holding
        if text.weights == "whole"
    }
    candidates = [
        t
        for t in holding
        if t.weights == "whole" or (t.replicate, t.ring, t.tp) not in whole
    ]
    if not candidates:
        candidates = [
            min(question.texts, key=lambda text: sum(text_bytes(question.shape, text)))
        ]
    costs = {
        text: text_cost(question.shape, text, question.device) for text in candidates
    }
    best = min(cost.seconds for cost in costs.values())
    enough = [text for text in candidates if WORTH_IT * costs[text].seconds <= best]
    fewest = min(text.devices for text in enough)
    text = min(
        (text for text in enough if text.devices == fewest),
        key=lambda text: costs[text].seconds,
    )
    return TextPlan(
        question=question,
        text=text,
        cost=costs[text],
        alone=text_cost(question.shape, question.alone, question.device),
        max_prompt=_longest_prompt(question),
    )


def _longest_prompt(question: TextQuestion) -> int:
    """Return the tokens of the longest prompt that fits with the question's new tokens; 0 if no prompt does."""

    def holds(prompt: int) -> bool:
        fits = (question.fits(replace(text, prompt=prompt)) for text in question.texts)
        return prompt <= MOST["prompt"] and any(fits)

    return largest(holds, digits=10)
