"""A folder of transformers, or an id of the Hub, onto the mesh: each rank reads no more than it keeps."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import MODEL_CONFIG
from ringspan.core.files.weights import refuse_beside
from ringspan.core.messages.lines import one_line, refused
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.consistency.loop_watch import in_call, watch_loop
from ringspan.torch.model.support import refuse_config, refuse_quantised
from ringspan.torch.model.weights.files import WeightFiles, folder_of
from ringspan.torch.model.weights.loading import first_of, unread_model
from ringspan.torch.model.weights.packed import pack_unread
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.foreign_mesh import ring_mesh

_log = logging.getLogger(__name__)


def from_pretrained(
    folder_or_id: str | Path,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | str = "auto",
    config: PreTrainedConfig | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
    variant: str | None = None,
    trust_remote_code: bool = False,
    model_class: Any = None,
    quantization_config: Any = None,
    adapt: Callable[[PreTrainedModel], Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """``parallelize(AutoModelForCausalLM.from_pretrained(folder_or_id), mesh)``, for models that no host can hold.

    Each rank reads its slices from the safetensors files, bit for bit, or receives one that ranks share from the first
    of them. In addition to its shards it holds one tensor at a time, or one layer while a feed-forward is tried out.

    Args:
        folder_or_id: a folder that ``save_pretrained`` wrote, or an id of the Hub, which is downloaded to its cache.
        mesh: as ``parallelize`` takes it.
        dtype: of the parameters; ``auto`` takes that of the config or of the files.
        config: in place of the folder's own.
        revision: a branch, tag or commit of an id of the Hub.
        local_files_only: look up an id only in the local cache.
        subfolder: with the config and the weights.
        variant: part of the names of the files, ``fp16`` for ``model.fp16.safetensors``.
        trust_remote_code: whether Python files of the folder may be run.
        model_class: transformers' auto class; default ``AutoModelForCausalLM`` if the model has one, which may be only
            the language part of one that sees: pass ``AutoModelForMultimodalLM``.
        quantization_config: a ``BitsAndBytesConfig``, to pack projections in 4 or 8 bits as they are read, with
            transformers' numbers. ``adapt`` gives them adapters.
        adapt: changes the model before it is split, ``lambda model: get_peft_model(model, config)``; its weights have
            shapes and dtypes then, and computations on them run when they are read.
        options: those of ``parallelize``.

    Raises:
        ConfigError: no weights in safetensors; files missing, cut or damaged; tensors missing or misshapen; by name.
        TypeError: an option that ``parallelize`` does not have.
        UnsupportedError, LayoutError, PeerMismatch: as ``parallelize``, and if ranks read different files.
    """
    mesh = ring_mesh(mesh)
    with meeting(mesh, "from_pretrained") as facts:
        with refused(
            f"{folder_or_id}: is no folder, nor to be had from the Hub",
            OSError,
            ValueError,
        ):
            folder = folder_of(
                folder_or_id,
                revision=revision,
                local_files_only=local_files_only,
                subfolder=subfolder,
                variant=variant,
            )
        config = (
            _config(folder, trust_remote_code=trust_remote_code)
            if config is None
            else config
        )
        refuse_config(config)
        refuse_quantised(config)
        files = WeightFiles(folder, config, variant=variant, adapter=adapt is not None)
        model, extra = unread_model(
            str(folder_or_id),
            folder,
            files,
            config,
            dtype,
            trust_remote_code=trust_remote_code,
            model_class=model_class,
        )
        if extra and mesh.get_rank() == int(mesh.mesh.min()):
            _log.warning(
                "%s: the model has no place for %s, left out",
                folder_or_id,
                first_of(extra),
            )
        if quantization_config is not None:
            pack_unread(model, quantization_config)
        model = model if adapt is None else adapt(model)
        facts.alike = {
            "tensors in the files": files.digest,
            "watchdog": options.get("watchdog", False),
        }
    if options.get("watchdog", False):
        watch_loop(mesh)  # a rank may be killed from now on
    with in_call("loading the model"):
        return parallelize(model, mesh, **options)


def _config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder; give another subfolder")
        if not (folder / MODEL_CONFIG).is_file():
            refuse_beside({path.name for path in folder.iterdir()}, adapter=False)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: {one_line(error)}") from error
