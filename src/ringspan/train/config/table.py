"""Base of a training file's tables."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

Strings = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Strings, of which a single one needs no brackets."""


class Table(BaseModel):
    """A TOML table: no unknown key, no conversion between types ("5" is not 5), no change after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
