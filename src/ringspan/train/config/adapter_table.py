"""Table [adapter]."""

from pydantic import Field, field_validator, model_validator

from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require
from ringspan.train.config.table import Table


class AdapterConfig(Table):
    """[adapter]: train LoRA matrices and freeze the weights; needs PEFT."""

    rank: int | None = Field(default=None, ge=1, examples=[16])
    """Rank of the matrices; if not set, all weights are trained, without an adapter."""
    alpha: float | None = Field(default=None, gt=0, examples=[32])
    """Their result is scaled by alpha / rank, or by alpha / sqrt(rank) with use_rslora; default: twice the rank."""
    target_modules: tuple[str, ...] = Field(default=("all-linear",), strict=False, min_length=1)
    """Layers with adapters, by the last parts of their names, such as ["q_proj", "v_proj"]; "all-linear" for all linear
    layers but the head."""
    use_dora: bool = False
    """Train the length of each row of a weight too (DoRA)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank), for high ranks."""
    dropout: float = 0.0
    """Must be 0: dropout would draw per rank, unlike one process."""
    merge: bool = False
    """Write the model with the adapter merged into its weights, instead of only the adapter."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ConfigError(
                f"adapter.dropout = {value}: each rank would draw for its own tokens, which no process alone would; "
                "set it to 0"
            )
        return value

    @model_validator(mode="after")
    def _check_rank(self) -> "AdapterConfig":
        if self.rank is None and (others := sorted(self.model_fields_set - {"rank"})):
            changed = [name for name in others if getattr(self, name) != type(self).model_fields[name].default]
            if changed:
                raise ConfigError(f"adapter.{changed[0]}: there is no adapter without a rank; set adapter.rank = 16")
        return self

    def require_extras(self) -> None:
        if self.rank is not None:
            require("an adapter", "peft")
