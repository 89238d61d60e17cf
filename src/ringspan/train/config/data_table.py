"""[data]: which text a run reads, and how."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from ringspan.core.errors import ConfigError
from ringspan.core.names import BalanceName
from ringspan.train.config.table import Table

DocumentsName = Literal["pack", "separate", "cut"]


class DataConfig(Table):
    """[data]: which text, and how it becomes sequences of one length."""

    paths: tuple[str, ...] = Field(strict=False, min_length=1, examples=[["data"]])
    """Files, folders (searched recursively, hidden entries left out) and "hub:<dataset id>[:<configuration>]"."""
    text_field: str = "text"
    """The field with the text in .json, .jsonl and .parquet files and in Hub datasets."""
    messages: str | None = Field(default=None, examples=["messages"])
    """The field with a conversation, a list of messages with role and content, in .json and .jsonl files, in place of
    text_field. Contents may have parts of type "image", "video" and "audio" with a path, from their file on (of
    a video also a list of frames). The processor beside the model makes a sequence of each conversation."""
    hub_split: str = "train"
    """Split of the Hub datasets; slices such as "train[:1%]" work."""
    extensions: tuple[str, ...] = Field(
        default=(".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".parquet"), strict=False, min_length=1
    )
    """Endings of the files that are read in a folder. A file that paths names itself is always read."""
    sequence_length_tokens: int = Field(ge=2, examples=[32768])
    """Tokens of one training sequence, over the whole ring."""
    documents: DocumentsName = "pack"
    """"pack" joins documents, each closed by the end-of-text token, into one stream of full sequences; "separate" does
    too, but lets no document of a sequence see another one, counts positions anew in each, and gives its last token no
    target; "cut" cuts each document on its own and pads its last sequence."""
    balance: BalanceName = "none"
    """"flops" shares the sequences of each step among its micro-steps and replicas so that those that work at the same
    time have like attention to compute, for documents = "separate"; which sequences a step has stays the same."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents, or of the text where these are few, held out for evaluation; 0: none. Where it is not
    set and the text is too short for a sequence of either kind, nothing is held out."""
    on_change: Literal["refuse", "continue"] = "refuse"
    """What a run that is resumed does when its text is not what it was: "refuse", or "continue" on the new text, which
    paths, text_field, hub_split and extensions may then name; the tokenizer stays that of the run."""

    @model_validator(mode="after")
    def _of_conversations(self) -> "DataConfig":
        if self.messages is not None:
            for name in ("text_field", "documents"):
                if name in self.model_fields_set:
                    raise ConfigError(f"data.{name}: is of text, and data.messages reads conversations; remove one")
        return self

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("extensions")
    @classmethod
    def _with_dots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for extension in value:
            if not extension.startswith("."):
                raise ConfigError(f'data.extensions = "{extension}": has no dot; write ".{extension}"')
        return value
