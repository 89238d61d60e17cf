"""A server of vLLM, as the first rank speaks to it: TRL's client, with a folder for weights that NCCL cannot send."""

import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from uuid import uuid4

import numpy as np
import requests
import torch
from torch import Tensor
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.lines import one_line, shortened
from ringspan.torch.model.named_weights import WeightMeta

_UPDATE_SECONDS: Final = 1800.0
_ASK_SECONDS: Final = 60.0
_TOKENS: Final = "/inference/v1/generate"


@contextmanager
def replaced(module: ModuleType, **ours: Any) -> Iterator[None]:
    """Put ours in the place of a module's names, which code of that module looks up when it runs."""
    space = vars(module)
    theirs = {name: space[name] for name in ours}
    space.update(ours)
    try:
        yield
    finally:
        space.update(theirs)


def without_vllm() -> AbstractContextManager[None]:
    """Let TRL make its client without vLLM: it needs vLLM for NCCL only."""
    return replaced(vllm_client, is_vllm_available=lambda *_, **__: True)


class RingVLLMClient(VLLMClient):
    """TRL's client, with errors of one line; ``folder`` is where weights are left for the server, if anywhere."""

    def __init__(
        self,
        url: str,
        group_port: int,
        timeout: float,
        folder: str | None,
        *,
        with_routes: bool = False,
    ) -> None:
        self.folder, self.with_routes = folder, with_routes
        # Coded routes of the last answer's completions, by the identity of their prompt's list.
        self._routed: dict[int, list[str | None]] = {}
        self.routes: list[Tensor] = []
        # The server may have adapters of an earlier training, and takes no name twice.
        self.adapter = f"ringspan-adapter-{uuid4().hex[:8]}"
        self.updates = 0
        with without_vllm(), answering(url):
            super().__init__(
                base_url=url, group_port=group_port, connection_timeout=timeout
            )
        self.served = self.model  # the base, while adapters have names of their own

    def prepare(self, device: Any, vocabulary: int) -> None:
        """Refuse a server of another vocabulary or without a way for weights, and join its group if it has one."""
        with answering(self.base_url):
            info = self.get_server_info()
            takes = [self._takes(token) for token in (vocabulary - 1, vocabulary)]
        if takes != [True, False]:
            raise ConfigError(
                f"the vLLM server at {self.base_url} has another vocabulary than this model, which has {vocabulary} "
                "tokens; start vllm serve with the folder of this model"
            )
        if self.folder is not None:
            return
        if info.get("weight_transfer_config") is None:
            raise ConfigError(
                f"the vLLM server at {self.base_url} has no weight-transfer engine; restart it with "
                'VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\', or set '
                "RingConfig(vllm_weights_folder=...)"
            )
        if device.type != "cuda":
            raise UnsupportedError(
                f"weights on {device} cannot be sent by NCCL; set RingConfig(vllm_weights_folder=...) to a folder that "
                "trainer and server share"
            )
        with answering(self.base_url):
            self.init_communicator(device)

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's settings; ask once, since a server that cannot tell them will not in a minute either."""
        where, asked = f"{self.base_url}/server_info", {"config_format": "json"}
        answer = requests.get(where, params=asked, timeout=_ASK_SECONDS)
        if answer.status_code == 404:
            raise ConfigError(
                f"the vLLM server at {self.base_url} has no development endpoints, which take the weights; restart it "
                "with VLLM_SERVER_DEV_MODE=1"
            )
        if answer.status_code != 200:
            raise ConfigError(
                f"the vLLM server at {self.base_url} answers {answer.status_code} to /server_info: "
                f"{shortened(answer.text)}; an environment without pip does so, install pip into the server's"
            )
        return answer.json()["vllm_config"]

    def _takes(self, token: int) -> bool:
        asked = {"model": self.model, "prompt": [token], "max_tokens": 1}
        answer = requests.post(
            f"{self.base_url}/v1/completions", json=asked, timeout=_ASK_SECONDS
        )
        return answer.status_code == 200

    def generate(
        self, prompts: Any, *args: Any, features: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Generate as TRL's client does; ``self.routes`` are then (tokens, layers, K) of each answer.

        They come from the endpoint that takes and gives only tokens.
        """
        if not self.with_routes:
            return super().generate(prompts, *args, features=features, **options)
        self._routed.clear()
        features = features or [None] * len(prompts)
        answer = super().generate(prompts, *args, features=features, **options)
        coded = [each for prompt in prompts for each in self._routed[id(prompt)]]
        self.routes = [self._decoded(each) for each in coded]
        return answer

    def _post(self, url: str, json: Any = None, **options: Any) -> Any:
        try:
            answer = super()._post(url, json=json, **options)
        except Exception as error:
            if url.endswith(_TOKENS) and "404" in str(error):
                raise ConfigError(
                    f"the vLLM server at {self.base_url} has no {_TOKENS}, which returns routes; restart it with "
                    "--enable-scale-out"
                ) from error
            raise
        if url.endswith(_TOKENS):
            self._routed[id(json["token_ids"])] = [
                choice.get("routed_experts") for choice in answer["choices"]
            ]
        return answer

    def _decoded(self, coded: str | None) -> Tensor:
        if coded is None:
            raise ConfigError(
                f"the vLLM server at {self.base_url} returns no routes; restart it with "
                "--enable-return-routed-experts"
            )
        found = np.load(BytesIO(b64decode(coded)), allow_pickle=False)
        return torch.from_numpy(found.astype(np.int16))

    def send(self, told: list[WeightMeta], weights: Iterator[Any]) -> None:
        """Send whole weights over the group of NCCL."""
        named = [
            (one.name, str(one.dtype).removeprefix("torch."), list(one.shape))
            for one in told
        ]
        with taking(self.base_url, told):
            self.update_named_params(named, weights)
            self.reset_prefix_cache()

    def load(self, folder: Path, told: list[WeightMeta]) -> None:
        """Let the server read whole weights from a folder."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        with taking(self.base_url, told):
            self._once("/collective_rpc", call)
            self.reset_prefix_cache()

    def load_adapter(self, folder: Path, told: list[WeightMeta]) -> None:
        """Let the server read an adapter from a folder, under a name that no cached prefix has."""
        before, self.updates = self.model, self.updates + 1
        name = f"{self.adapter}-{self.updates}"
        with taking(self.base_url, told):
            self._once(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
            )
            self.model = name
            if before != self.served:
                self._once("/v1/unload_lora_adapter", {"lora_name": before})

    def _once(self, path: str, body: dict[str, Any]) -> None:
        """Post without the session's retries: an update that has begun is not begun again."""
        url = f"{self.base_url}{path}"
        answer = requests.post(url, json=body, timeout=_UPDATE_SECONDS)
        if answer.status_code != 200:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text}")


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Turn failures of a request into one line that names the server."""
    try:
        yield
    except requests.RequestException as error:
        raise ConnectionError(
            f"the vLLM server at {url} does not answer: {one_line(error)}; start it, and resume from a checkpoint"
        ) from error


@contextmanager
def taking(url: str, told: list[WeightMeta]) -> Iterator[None]:
    """Turn failures of an update into one line with the weight that the server names, or with the first one."""
    with answering(url):
        try:
            yield
        except requests.RequestException:
            raise
        except Exception as error:  # TRL raises plain ones
            by_length = sorted(told, key=lambda one: -len(one.name))
            named = next((one for one in by_length if one.name in str(error)), told[0])
            raise ConfigError(
                f"the vLLM server at {url} did not take the weights ({named.name}, {list(named.shape)}): "
                f"{one_line(error)}; start vllm serve with the folder of this model"
            ) from error


@contextmanager
def folder_in(parent: str) -> Iterator[Path]:
    """Yield a new folder in a shared one, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".ringspan-weights-", dir=parent) as folder:
        Path(folder).chmod(0o755)  # the server may be another user's
        yield Path(folder)
