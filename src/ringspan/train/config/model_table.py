"""Tables [model] and [adapter]."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.messages.extras import require
from ringspan.core.messages.lines import refused
from ringspan.core.names import DtypeName
from ringspan.train.config.problems import Strings, Table, shown

# A byte-level BPE has one token for each byte and <|endoftext|>.
MIN_VOCAB_SIZE = 257


class ModelConfig(Table):
    """[model]: the model, its weights and its tokenizer."""

    path: str | None = Field(default=None, examples=["Qwen/Qwen3-0.6B"])
    """Local folder or Hub id of the model; needed if init is "pretrained"."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """"pretrained" loads the weights of path; "scratch" draws new ones for the architecture in config, and is the
    default if config is set and path is not."""
    config: str | dict[str, Any] | None = Field(
        default=None,
        examples=[{"model_type": "llama", "vocab_size": 2048, "hidden_size": 128}],
    )
    """For init = "scratch": a table of Hugging Face config values with model_type, or the path of a config.json."""
    tokenizer: str | None = Field(default=None, examples=["train"])
    """Local folder or Hub id of the tokenizer; default: path. "train" trains a byte-level BPE on the data."""
    dtype: DtypeName = "float32"
    """Dtype of computing, and of the saved model: "float32" or "bfloat16"."""
    parameter_dtype: DtypeName = "float32"
    """Dtype of parameters, gradients and AdamW's moments. "bfloat16" takes half the memory, but loses updates smaller
    than a 512th of a weight: use it if float32 does not fit. Gradients are summed over ranks in float32 either way."""
    compile: bool | str = False
    """Compile each layer with torch.compile in the first step; a name chooses another backend than "inductor"."""
    trust_remote_code: bool = False
    """Run Python files that come with the model and its tokenizer; if false, none of them runs."""
    rope: dict[str, Any] | None = Field(
        default=None, examples=[{"type": "yarn", "factor": 4.0}]
    )
    """Scaling of rotary positions: a table with type "linear", "dynamic", "yarn", "llama3" or "longrope", factor, and
    transformers' other keys for that type; default: the model's own."""

    @model_validator(mode="before")
    @classmethod
    def _scratch_where_only_that_fits(cls, values: object) -> object:
        if (
            isinstance(values, dict)
            and "init" not in values
            and values.get("config") is not None
        ):
            return (
                values
                if values.get("path") is not None
                else values | {"init": "scratch"}
            )
        return values

    @field_validator("dtype", "parameter_dtype", mode="before")
    @classmethod
    def _refuse_float16(cls, value: object, info: ValidationInfo) -> object:
        if value in ("float16", "fp16", "half"):
            raise ConfigError(
                f'model.{info.field_name} = "{value}": float16 overflows without loss scaling, which ringspan does not '
                'do; use "bfloat16" or "float32"'
            )
        return value

    @model_validator(mode="after")
    def _check_sources(self) -> "ModelConfig":
        if self.init == "pretrained":
            if self.path is None:
                raise ConfigError(
                    'model.path: missing; init = "pretrained" needs a local folder or a Hub id'
                )
            if self.config is not None:
                raise ConfigError(
                    'model.config: only for init = "scratch"; remove it, or set model.init = "scratch"'
                )
            if self.tokenizer == "train":
                raise ConfigError(
                    'model.tokenizer = "train": a pretrained model needs the tokenizer it was trained with; '
                    'remove the key, or set model.init = "scratch"'
                )
        else:
            if self.config is None:
                raise ConfigError(
                    'model.config: missing; init = "scratch" needs a table such as { model_type = "llama", '
                    "hidden_size = 64 } or the path of a config.json"
                )
            if self.tokenizer_source is None:
                raise ConfigError(
                    'model.tokenizer: missing; give a local folder or a Hub id, or "train" to train one on the data'
                )
        return self

    @property
    def tokenizer_source(self) -> str | None:
        """A folder, a Hub id or "train"; never None in a loaded configuration."""
        return self.tokenizer or self.path

    def config_values(self) -> dict[str, Any]:
        values = self.config
        if isinstance(values, str):
            values = _read_json(values)
        if not isinstance(values, dict) or not isinstance(
            values.get("model_type"), str
        ):
            raise ConfigError(
                f'model.config = {shown(self.config)}: has no model_type; add one, such as model_type = "llama"'
            )
        size = values.get("vocab_size", MIN_VOCAB_SIZE)
        if self.tokenizer == "train" and (
            not isinstance(size, int) or size < MIN_VOCAB_SIZE
        ):
            raise ConfigError(
                f"model.config.vocab_size = {size}: a trained byte-level tokenizer needs at least {MIN_VOCAB_SIZE} "
                "tokens; raise it"
            )
        return dict(values)


def _read_json(path: str) -> object:
    where = f"model.config = {json.dumps(path)}"
    try:
        with refused(
            f"{where}: is not valid JSON",
            ValueError,
            RecursionError,
            remedy="; repair it",
        ):
            return json.loads(read_small(Path(path).expanduser()))
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); give a table or the path of a config.json"
        ) from error


class AdapterConfig(Table):
    """[adapter]: train LoRA matrices and freeze the weights; needs PEFT."""

    rank: int | None = Field(default=None, ge=1, examples=[16])
    """Rank of the matrices; if not set, all weights are trained, without an adapter."""
    alpha: float | None = Field(default=None, gt=0, examples=[32])
    """Their result is scaled by alpha / rank, or by alpha / sqrt(rank) with use_rslora; default: twice the rank."""
    target_modules: Strings = Field(default=("all-linear",), strict=False, min_length=1)
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
            changed = [
                name
                for name in others
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if changed:
                raise ConfigError(
                    f"adapter.{changed[0]}: there is no adapter without a rank; set adapter.rank = 16"
                )
        return self

    def require_extras(self) -> None:
        if self.rank is not None:
            require("an adapter", "peft")
