"""Base of a training file's tables."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A TOML table: no unknown key, no conversion between types ("5" is not 5), no change after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
