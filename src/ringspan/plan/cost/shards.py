"""A rank's shards of parameters and moments, and what its host holds."""

from typing import Final

from ringspan.plan.cost.folds import most_waiting
from ringspan.plan.cost.kept import saved_per_token
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.shapes import ModelShape

_FLOAT32: Final = 4
# Bytes per number, with a float32 factor per block of 256 (bitsandbytes, torchao) or 128.
MOMENT_BYTES: Final = {"float32": 4.0, "8bit": 1 + 4 / 256, "4bit": 1 / 2 + 4 / 128}


def local_parameter_bytes(shape: ModelShape, setting: Setting) -> int:
    local, trained = (
        shape.split(setting.tp),
        setting.ring * local_trained_bytes(shape, setting),
    )
    if not shape.lora:
        return setting.parameter_bytes * local.parameters // setting.ring
    packed = sum(
        kind.packed * count for kind, count in local.counted(local.layers).items()
    )
    return (
        local.bytes_of(
            local.parameters - local.trained, packed, setting.parameter_bytes
        )
        + trained
    ) // setting.ring


def local_trained_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return a rank's bytes of trained parameters; gradients take the same, moments that are not packed twice that."""
    return (
        trained_number_bytes(shape, setting)
        * shape.split(setting.tp).trained
        // setting.ring
    )


def moment_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return a rank's bytes of AdamW's two moments; tensors of fewer than 4,096 numbers count as packed, too."""
    trained = local_trained_bytes(shape, setting)
    if setting.optimizer_state == "float32":
        return 2 * trained
    return round(
        2
        * MOMENT_BYTES[setting.optimizer_state]
        * trained
        / trained_number_bytes(shape, setting)
    )


def trained_number_bytes(shape: ModelShape, setting: Setting) -> int:
    return _FLOAT32 if shape.lora else setting.parameter_bytes  # adapters are float32


def host_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes that a rank keeps on the host: checkpointed activations and AdamW's moments."""
    moments = moment_bytes(shape, setting) if setting.has_moments_on_host else 0
    if setting.offload == "none":
        return moments
    local = shape.split(setting.tp)
    kept = setting.fold.tokens * saved_per_token(local, setting, local.layers)
    return moments + most_waiting(local, setting, kept)


def host_use(shape: ModelShape, setting: Setting) -> dict[str, int]:
    """Return a GPU rank's host bytes while loading weights, training and saving a checkpoint.

    Loading: one weight, or a layer while its feed-forward is tried out. Saving: a copy of trained parameters and
    moments. On a CPU the device is the host and counts these two.
    """
    train = host_bytes(shape, setting)
    if not setting.on_gpu:
        return {"load": 0, "train": train, "save": train}
    largest = max(shape.vocab * shape.hidden, shape.layer_parameters)
    return {
        "load": setting.parameter_bytes * largest,
        "train": train,
        "save": train
        + local_trained_bytes(shape, setting)
        + moment_bytes(shape, setting),
    }
