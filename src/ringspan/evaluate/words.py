"""Words for prompts: common, short and distinct."""

from random import Random
from typing import Final

from ringspan.core.errors import ConfigError

_ADJECTIVES = """
able amber ample aqua arctic ashen azure bare blunt bold brave brief bright brisk broad bronze busy calm candid cheap
chief civic clean clear clever close coarse cold common coral cosmic cozy crisp cubic curly daring dark deep dense dim
distant dusty eager early elastic empty even exact faint fair famous fancy fast fierce final firm fluffy formal frank
free fresh frosty frugal gentle giant glad golden grand grave green handy happy harsh hasty heavy hollow honest humble
icy ideal idle indigo inner ivory jolly junior keen kind large late lavish lazy lean level light lively local lone
long loud loyal lucid lunar magic major mellow merry mild minor misty modern modest narrow neat noble novel odd olive
open oval pale patient plain polar polite proud pure quick quiet rapid rare raw ready regal rich rigid ripe robust
rough round royal rural rusty
"""
_NOUNS = """
acorn anchor apple arrow atlas badge bagel banner barrel basket beacon beetle bell bench berry bishop blanket bottle
bridge bucket buffalo button cabin cactus camel candle canoe canyon carrot castle cedar cellar chair cherry circus
clock cloud comet compass copper cotton cradle crane cricket crown dagger daisy dolphin donkey dragon drum eagle elbow
ember engine falcon feather fiddle finger flute forest fossil fountain garden garlic geyser ginger glacier glove
goblet guitar hammer harbor harvest hazel helmet heron hill honey horizon hotel island jacket jaguar jewel jungle
kettle kitten knight ladder lagoon lantern lemon lever library lizard lobster locket maple marble market meadow melon
mirror monkey moth mountain needle nest nugget oak ocean onion orbit orchard otter oyster paddle palace panda parrot
peanut pebble pelican pepper piano pigeon pillow planet pocket pony prairie pumpkin puzzle quarry rabbit raven ribbon
river rocket saddle
"""
ADJECTIVES: Final = tuple(_ADJECTIVES.split())
NOUNS: Final = tuple(_NOUNS.split())


def names(random: Random, count: int) -> list[str]:
    """Return different names like ``brave-otter``, of three words if two are too few, or raise ConfigError."""
    adjectives, nouns = len(ADJECTIVES), len(NOUNS)
    pairs = adjectives * nouns
    if count <= pairs:
        return [f"{ADJECTIVES[at // nouns]}-{NOUNS[at % nouns]}" for at in random.sample(range(pairs), count)]
    if count > adjectives * pairs:
        raise ConfigError(
            f"{count:,} different names are needed, and there are {adjectives * pairs:,}; give fewer --needles and "
            "--distractors, or smaller --lengths"
        )
    drawn = random.sample(range(adjectives * pairs), count)
    return [f"{ADJECTIVES[at // pairs]}-{ADJECTIVES[at % pairs // nouns]}-{NOUNS[at % nouns]}" for at in drawn]


def number(random: Random) -> str:
    return str(random.randrange(10_000, 100_000))
