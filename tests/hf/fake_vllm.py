"""A server that answers as vLLM does, or SGLang, with transformers behind it.

python -m tests.hf.fake_vllm serve MODEL --port 8000 [options of vllm serve, which it passes over]
"""

import argparse
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from torch.nn.functional import log_softmax
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from tests.every_model.weights import stored


class FakeVLLM(ThreadingHTTPServer):
    """Serves the model of a folder on a port, or on a free one; ``fails`` has paths that answer 500."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.sees = (folder / "processor_config.json").is_file()
        kind = AutoModelForImageTextToText if self.sees else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.adapters: dict[str, Any] = {}
        self.asked: list[str] = []
        self.fails: dict[str, str] = {}
        # Whether it was started with VLLM_SERVER_DEV_MODE=1.
        self.is_dev = True
        self.dies_at: str | None = None
        # By path, what is called before the answer to a request of that number.
        self.before: dict[str, tuple[int, Any]] = {}
        self.rows = 0
        # What the endpoint of tokens says of routes: the model's, others, or none.
        self.routes = "own"
        self.missing: set[str] = set()  # paths that it does not have
        self.lock = threading.Lock()

    def stop(self) -> None:
        """End: further requests are refused."""
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reload(self, folder: Path) -> None:
        """Take all weights of a folder, as ``reload_weights`` does: no weight may be missing or misshapen."""
        found = stored(folder)
        if not self.sees:
            take(self.model, found)
            return
        # Names of a model that sees are others on disk than in memory.
        self.model, told = type(self.model).from_pretrained(
            None,
            config=self.model.config,
            state_dict=found,
            dtype=torch.float32,
            output_loading_info=True,
        )
        self.model.eval()
        wrong = [name for name, faults in told.items() if faults]
        if wrong:
            raise ValueError(f"weights with {wrong[0]}: {told[wrong[0]]}")

    def render(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what the model takes of a conversation's images, and where they stand in that conversation."""
        [message] = asked["messages"]
        pictures = [
            Image.open(BytesIO(b64decode(part["image_url"]["url"].partition(",")[2])))
            for part in message["content"]
        ]
        processor = AutoProcessor.from_pretrained(self.folder)
        values = processor.image_processor(pictures, return_tensors="np").pixel_values
        places = [{"offset": 7 * number, "length": 4} for number in range(len(values))]
        coded = [_coded(value) for value in values]
        return {
            "features": {
                "mm_hashes": {"image": [each[-16:] for each in coded]},
                "mm_placeholders": {"image": places},
                "kwargs_data": {"image": coded},
            }
        }

    def media_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the images of a request for a pass; each has to be where its tokens are."""
        features = asked.get("features")
        if features is None:
            return {}
        token, ids = self.model.config.image_token_id, asked["token_ids"]
        for place in features["mm_placeholders"]["image"]:
            start, end = place["offset"], place["offset"] + place["length"]
            assert set(ids[start:end]) == {token} != {*ids[end : end + 1]}
        values = [_decoded(each) for each in features["kwargs_data"]["image"]]
        return {"pixel_values": torch.from_numpy(np.stack(values))}

    def complete(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Draw completions; a row's numbers depend on its prompt and its place there alone."""
        model = self.adapters.get(asked["model"], self.model)
        prompts = asked["prompt"]
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        media = self.media_of(asked)
        choices = []
        for prompt in prompts:
            for place in range(asked.get("n", 1)):
                generator = torch.Generator().manual_seed(sum(prompt) * 31 + place)
                found = drawn(model, prompt, asked, generator, media)
                choices.append(_choice(prompt, *found))
        return choices

    def with_routes(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice as the endpoint of tokens gives it; the last token was never computed."""
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"]
        content = [
            {"token": f"token_id:{token}", "logprob": found, "top_logprobs": []}
            for token, found in zip(choice["token_ids"], logprobs, strict=True)
        ]
        answer = {"token_ids": choice["token_ids"], "logprobs": {"content": content}}
        if self.sees or self.routes == "none":
            return answer
        routes = returned_routes(self.model, ids, self.routes)
        return answer | {"routed_experts": _coded(routes)}

    def generate(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Draw as ``complete`` does, in SGLang's form: a row for each prompt, with a place of its own."""
        drawing, prompts = asked["sampling_params"], asked["input_ids"]
        options = drawing | {"max_tokens": drawing["max_new_tokens"]}
        found = []
        for row, prompt in enumerate(prompts):
            place = prompts[:row].count(prompt)
            generator = torch.Generator().manual_seed(sum(prompt) * 31 + place)
            tokens, logprobs = drawn(self.model, prompt, options, generator)
            parts = zip(logprobs, tokens, strict=True)
            kept = [[logprob, token, None] for logprob, token in parts]
            found.append({"meta_info": {"output_token_logprobs": kept}})
        self.rows += len(found)
        return found


def routes_of(model: Any, ids: list[int]) -> np.ndarray:
    """The experts (tokens, layers, K) that a model's routers choose, each layer by one ``topk``."""
    chosen: list[torch.Tensor] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **kwargs or {})
            if func is torch.topk:
                chosen.append(found.indices)
            return found

    with torch.no_grad(), Seen():
        model(input_ids=torch.tensor([ids]))
    return torch.stack(chosen, 1).numpy()


def returned_routes(model: Any, ids: list[int], which: str) -> np.ndarray:
    """The model's ``own`` routes of a row as vLLM returns them, or ``others``, as of another precision."""
    routes = routes_of(model, ids)[:-1]
    if which == "others":
        routes = (routes + 1) % model.config.num_local_experts
    return routes.astype(np.uint8)


def take(model: Any, found: dict[str, Any]) -> None:
    """Take all weights of a checkpoint: no weight may be missing or misshapen."""
    own = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    for name, tensor in found.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"cannot load {name}")
    if missing := own.keys() - found.keys() - tied:
        raise ValueError(f"no {min(missing)}")
    model.load_state_dict(found, strict=False)
    model.tie_weights()


@torch.no_grad()
def drawn(
    model: Any,
    prompt: list[int],
    asked: dict[str, Any],
    generator: torch.Generator,
    media: dict[str, Any] | None = None,
) -> tuple[list[int], list[float]]:
    """Draw a completion, with the log-probabilities of its tokens as with logprobs-mode processed_logprobs."""
    ids, logprobs = list(prompt), list[float]()
    while len(ids) < len(prompt) + asked["max_tokens"]:
        whole = {"input_ids": torch.tensor([ids])} | (media or {})
        logits = model(**whole).logits[0, -1].double()
        temperature = asked.get("temperature", 1.0)
        found = log_softmax(logits / (temperature or 1.0), -1)
        chances = found.exp()
        if media:  # a pass refuses an image's token that has no image
            chances[model.config.image_token_id] = 0
        token = int(chances.argmax())
        if temperature:
            token = int(torch.multinomial(chances, 1, generator=generator))
        ids.append(token)
        logprobs.append(float(found[token]))
        if token == 1:
            break
    return ids[len(prompt) :], logprobs


def _coded(values: np.ndarray) -> str:
    file = BytesIO()
    np.save(file, values)
    return b64encode(file.getvalue()).decode()


def _decoded(coded: str) -> np.ndarray:
    return np.load(BytesIO(b64decode(coded)), allow_pickle=False)


def _choice(
    prompt: list[int], answer: list[int], logprobs: list[float]
) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(prompt),
        "token_ids": answer,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in answer],
            "token_logprobs": logprobs,
            "top_logprobs": [None] * len(answer),
        },
    }


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": str(self.server.folder)}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": None,
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                }
            },
        }
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path in self.server.fails:
            self._answer(500, {"error": {"message": self.server.fails[path]}})
        elif path == "/server_info" and not self.server.is_dev:
            self._answer(404, {"detail": "Not Found"})
        else:
            self._answer(200, answers[path])

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = json.loads(body) if body else {}
        server.asked.append(self.path)
        number, call = server.before.get(self.path, (0, None))
        if server.asked.count(self.path) == number:
            call()
        if server.dies_at == self.path:
            self.close_connection = True
            threading.Thread(target=server.stop).start()
            return
        if self.path in server.missing:
            self._answer(404, {"detail": "Not Found"})
            return
        with server.lock:
            try:
                self._answer(200, self._do(asked))
            except (ValueError, RuntimeError) as error:
                self._answer(500, {"error": {"message": str(error)}})
            except IndexError as error:
                self._answer(400, {"error": {"message": str(error)}})

    def _do(self, asked: dict[str, Any]) -> Any:
        server = self.server
        if self.path in server.fails:
            raise RuntimeError(server.fails[self.path])
        match self.path:
            case "/v1/completions":
                choices = server.complete(asked)
                server.rows += len(choices)
                return {"choices": choices}
            case "/inference/v1/generate":
                sampled = asked["sampling_params"]
                whole = sampled | asked | {"prompt": asked["token_ids"]}
                choices = server.complete(whole)
                server.rows += len(choices)
                return {"choices": [server.with_routes(each) for each in choices]}
            case "/v1/chat/completions/render":
                return server.render(asked)
            case "/collective_rpc":
                assert asked["method"] == "reload_weights"
                server.reload(Path(asked["kwargs"]["weights_path"]))
            case "/v1/load_lora_adapter":
                if (name := asked["lora_name"]) in server.adapters:
                    raise IndexError(f"{name} has already been loaded")
                base = AutoModelForCausalLM.from_pretrained(server.folder)
                made = PeftModel.from_pretrained(base.float(), asked["lora_path"])
                server.adapters[name] = made.eval()
            case "/update_weights_from_disk":
                server.reload(Path(asked["model_path"]))
            case "/generate":
                return server.generate(asked)
            case "/v1/unload_lora_adapter":
                server.adapters.pop(asked["lora_name"])
        return {"success": True}

    def _answer(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(folder: Path) -> Iterator[FakeVLLM]:
    server = FakeVLLM(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    FakeVLLM(given.model, given.port).serve_forever()


if __name__ == "__main__":
    main()
