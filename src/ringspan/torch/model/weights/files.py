"""Safetensors files of a Hugging Face folder, read lazily."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.files.weights import files_to_download, refuse_beside, weights_in
from ringspan.core.messages.lines import one_line, refused
from ringspan.torch.model.weights.deferred import Deferred, Region, deferred

_log: Final = logging.getLogger(__name__)
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


class _Stored:
    def __init__(
        self, path: Path, file: safe_open, name: str, place: tuple[int, int]
    ) -> None:
        self._path, self._file, self.place = path, file, place
        self._slice: Any = file.get_slice(name)
        self.name, self.shape = name, tuple(self._slice.get_shape())
        kind = self._slice.get_dtype()
        if kind not in DTYPES:
            raise ConfigError(
                f"{path}: {name} has the dtype {kind}, which is not supported; save it in another"
            )
        self.dtype: torch.dtype = DTYPES[kind]

    def read(self, region: Region) -> Tensor:
        """Return a part, in mapped memory if its rows are whole."""
        with refused(
            f"{self._path}: {self.name} cannot be read",
            SafetensorError,
            OSError,
            ValueError,
            RuntimeError,
        ):
            return self._slice[region] if region else self._file.get_tensor(self.name)


class WeightFiles:
    """The tensors, by name, in the files of a folder that transformers would open; ConfigError if these are broken."""

    def __init__(
        self,
        folder: Path,
        config: object = None,
        *,
        variant: str | None = None,
        adapter: bool = False,
    ) -> None:
        """Open the folder's files, those with a ``variant`` if given, and list their tensors unread.

        Raises ConfigError if the folder has no such files, or a file lacks a tensor that the index names.
        """
        self.tensors: dict[str, Deferred] = {}
        facts: list[tuple[str, str, str, tuple[int, ...]]] = []
        # Dangling links are left out.
        names = {path.name for path in folder.iterdir() if path.is_file()}
        try:
            refuse_beside(names, adapter=adapter)
            named = getattr(config, "transformers_weights", None)
            found = weights_in(
                names,
                lambda name: read_small(folder / name),
                named=named,
                variant=variant,
            )
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
        for number, name in enumerate(found):
            path = folder / name
            file = _open(path)
            offsets = {name: offset for offset, name in enumerate(file.offset_keys())}
            for name in file.keys():  # noqa: SIM118 - in the order in which transformers looks for a dtype
                stored = _Stored(path, file, name, (number, offsets[name]))
                self.tensors[name] = deferred(stored)
                facts.append((path.name, name, str(stored.dtype), stored.shape))
        for name, wanted in found.items():  # a tensor may be in any of the files
            if lacking := sorted(wanted - self.tensors.keys()):
                raise ConfigError(
                    f"{folder / name}: has no {lacking[0]}, which the index says is there"
                )
        if not self.tensors:
            raise ConfigError(f"{folder}: its weights are empty; save them again")
        self.digest = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]
        """Digest of names, dtypes and shapes, so that ranks can check that they read the same weights."""


def folder_of(
    name: str | Path, *, revision: str | None = None, local_files_only: bool = False, subfolder: str = "",
    variant: str | None = None, more: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Return the local folder of a name, after downloading the needed files and ``more``.

    Raises OSError, ValueError or ConfigError.
    """
    if Path(name).is_dir():
        return Path(name, subfolder)
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    repository, inside = str(name), f"{subfolder.strip('/')}/" if subfolder else ""
    wanted = [f"{inside}*.json", f"{inside}*.safetensors", "*.py"]
    if not local_files_only:
        try:
            listed = HfApi().list_repo_files(repository, revision=revision)
            names = [
                each.removeprefix(inside) for each in listed if each.startswith(inside)
            ]
            chosen = files_to_download(
                names,
                lambda file: read_small(
                    hf_hub_download(repository, inside + file, revision=revision)
                ),
                variant=variant,
            )
            wanted = [inside + each for each in chosen]
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        except Exception as error:
            # Any error of the client or its HTTP library. The local cache is tried next, with its own error.
            _log.info("%s: its files cannot be listed: %s", name, one_line(error))
    options: dict[str, Any] = {
        "revision": revision,
        "local_files_only": local_files_only,
    }
    return Path(
        snapshot_download(repository, allow_patterns=[*wanted, *more], **options),
        subfolder,
    )


@contextmanager
def opened_files(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Open a folder's shards on demand, each once; CheckpointError for a file that is none."""
    with ExitStack() as stack:

        @cache
        def opened(name: str) -> safe_open:
            path = folder / name
            with refused(
                f"{path}: is not a shard",
                SafetensorError,
                OSError,
                ValueError,
                error_type=CheckpointError,
            ):
                return stack.enter_context(safe_open(path, "pt"))

        yield opened


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt").__enter__()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: is missing, and the index or config.json names it; copy it there"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read, cut or damaged: {one_line(error)}"
        ) from error
