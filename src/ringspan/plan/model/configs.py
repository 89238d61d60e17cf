"""Source of a model's shape: built in, or a config.json read by transformers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.files.named import read_small, why_no_config
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.messages.lines import one_line
from ringspan.core.recurrence.cost import Scan
from ringspan.core.selection import Index
from ringspan.plan.model.hub import from_hub
from ringspan.plan.model.kinds import Kept, LayerKind
from ringspan.plan.model.media import NO_MEDIA, Media
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.names import normal, unknown


def _shape(name: str, row: Mapping[str, Any]) -> ModelShape:
    fields = dict(row["shape"])
    order, kinds = fields.pop("order"), [_kind(each) for each in fields.pop("kinds")]
    fields |= {
        "around": tuple(Kept(*row) for row in fields["around"]),
        "kinds": tuple(kinds[int(at, 36)] for at in order),
    }
    return ModelShape(name=name, config=json.dumps(row["config"]), **fields)


def _kind(values: Mapping[str, Any]) -> LayerKind:
    scan = Scan(**values["scan"]) if "scan" in values else None
    if "mask" in values:
        values = {**values, "mask": LayerMask(**values["mask"])}
    if "index" in values:
        index = dict(values["index"])
        index["tail"] = tuple(index.get("tail", (0, 0)))
        values = {**values, "index": Index(**index)}
    made = {
        name: tuple(values[name]) for name in ("linears", "experts") if name in values
    }
    return LayerKind(
        **{
            **values,
            **made,
            "kept": tuple(Kept(*row) for row in values["kept"]),
            "scan": scan,
        }
    )


# Configs of published models with their sources, and what ``reader`` counts of them: `python -m tests.plan.models`.
_ROWS: Final = json.loads(
    Path(__file__).with_name("models.json").read_text(encoding="utf-8")
)
MODELS: Final = {
    name: _shape(name, row) for name, row in _ROWS.items() if "shape" in row
}


def model_shape(
    text: str, media: Media = NO_MEDIA, dtype: str = "bfloat16"
) -> ModelShape:
    """Return the shape by built-in name, config.json (or its folder) or Hugging Face id; raise if unknown or not read.

    ``media`` is what each sequence holds besides text, for towers that compute in ``dtype``.
    """
    path = Path(text).expanduser()
    if not text.strip():
        raise ConfigError(
            f"--model {text!r}: give a name such as llama-3.1-8b, a config.json or its folder, or an id"
        )
    if path.exists() or path.suffix == ".json":
        if reason := why_no_config(path):
            raise ConfigError(f"--model {text!r}: {reason}")
        return read_config(
            path / "config.json" if path.is_dir() else path, media, dtype
        )
    if normal(text) in MODELS:
        _refuse_media(text, media)
        return MODELS[normal(text)]
    published = (
        normal(text.rpartition("/")[2])
        .replace("meta-", "")
        .removesuffix("-instruct")
        .removesuffix("-base")
    )
    if "/" in text and published in MODELS:
        _refuse_media(text, media)
        return replace(MODELS[published], name=text)
    if "/" in text:
        return _from_hub(text, media, dtype)
    raise unknown(
        "model",
        text,
        MODELS,
        "; or give a config.json, its folder, or a Hugging Face id",
    )


def _from_hub(repository: str, media: Media, dtype: str) -> ModelShape:
    from huggingface_hub import hf_hub_download

    try:
        with from_hub(f"--model {repository!r}", repository):
            path = hf_hub_download(repository, "config.json")
    except ConfigError:
        raise
    except Exception as error:  # the Hub's client raises errors of several libraries
        raise ConfigError(
            f"--model {repository!r}: could not download config.json: {one_line(error)}"
        ) from error
    return replace(read_config(Path(path), media, dtype), name=repository)


def read_config(
    path: Path, media: Media = NO_MEDIA, dtype: str = "bfloat16"
) -> ModelShape:
    try:
        values = json.loads(read_small(path))
    except OSError as error:
        raise ConfigError(
            f"--model {str(path)!r}: cannot be read ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model {str(path)!r}: is not valid JSON ({one_line(error)})"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"--model {str(path)!r}: should hold a JSON object, the config of a Hugging Face model"
        )
    return from_config(values, path.parent.name or str(path), media, dtype)


def from_config(
    values: Mapping[str, Any],
    name: str,
    media: Media = NO_MEDIA,
    dtype: str = "bfloat16",
) -> ModelShape:
    """Return the shape of a config's values; UnsupportedError for a type no ring runs, packed weights, uneven heads."""
    if isinstance(packed := values.get("quantization_config"), dict):
        raise UnsupportedError(
            f"{name}: is quantised ({packed.get('quant_method')}); plan the model that it was made of, or a copy of "
            f"its config.json without quantization_config, and add --lora 16 --weights {_packed_name(packed)} to train "
            "adapters over it"
        )
    if not isinstance(values.get("model_type"), str):
        raise UnsupportedError(
            f"{name}: model_type={values.get('model_type')!r} is no type of transformers"
        )
    from ringspan.plan.model.reader import text_shape
    from ringspan.plan.model.towers import seeing_shape

    shape = seeing_shape(values, name, media, dtype)
    if shape is None:
        _refuse_media(name, media)
        shape = text_shape(values, name)
    return shape


def _packed_name(packed: Mapping[str, Any]) -> str:
    """Return ``--weights`` for a quantization_config, as far as plans know its format."""
    if packed.get("quant_method") != "bitsandbytes" or packed.get("load_in_8bit"):
        return "int8"
    if packed.get("bnb_4bit_quant_type") != "nf4":
        return "int4"
    return "nf4-double" if packed.get("bnb_4bit_use_double_quant") else "nf4"


def _refuse_media(name: str, media: Media) -> None:
    for units in media.values():
        raise ConfigError(
            f"{units.option}: {name} is a model of text alone; leave it out"
        )
