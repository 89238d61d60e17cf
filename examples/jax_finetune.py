"""Train a Llama in JAX on text, its sequences split over a ring of devices.

    python examples/jax_finetune.py                          # a small model from scratch, on four virtual CPU devices
    python examples/jax_finetune.py --model path/to/llama    # a Hugging Face Llama folder, saved back when done
    python examples/jax_finetune.py --sp 2 --fsdp 2          # another mesh

Needs ringspan[jax], flax, optax and orbax-checkpoint; the model is jax_llama.py beside it. Run it again with more
--steps and it resumes from its newest checkpoint.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax_llama import (
    Llama,
    LlamaConfig,
    load_checkpoint,
    load_llama,
    mean_loss,
    save_checkpoint,
    save_llama,
    shardings,
)

from ringspan import RingspanError
from ringspan.jax import init_mesh, shard_batch

SMALL = LlamaConfig(
    vocab_size=256,  # a token is a byte
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a Hugging Face Llama; default: a small new one",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[Path("README.md"), Path("docs"), Path("src")],
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("runs/jax_finetune"),
        help="folder for checkpoints",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        help="tokens of a sequence, over the whole ring",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    for axis, size, meaning in (("dp", 1, "copies"), ("fsdp", 1, "parts of the weights"), ("tp", 1, "parts of the heads"), ("sp", 4, "ring")):  # fmt: skip  # noqa: E501
        parser.add_argument(
            f"--{axis}", type=int, default=size, help=f"devices: {meaning}"
        )
    return parser.parse_args()


def read_text(paths: list[Path]) -> str:
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    return "\n".join(
        file.read_text(encoding="utf-8")
        for file in files
        if file.suffix in (".md", ".py", ".txt")
    )


def encode(text: str, model: Path | None) -> np.ndarray:
    """Token ids: of the model's tokenizer, or bytes where the model is new."""
    if model is None:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    from tokenizers import Tokenizer

    return np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def main() -> None:
    options = arguments()
    # without accelerators: as many virtual devices as the mesh has
    sizes = {axis: getattr(options, axis) for axis in ("dp", "fsdp", "tp", "sp")}
    if jax.config.jax_platforms in (
        None,
        "cpu",
    ):
        jax.config.update("jax_num_cpu_devices", int(np.prod(list(sizes.values()))))
    mesh = init_mesh(**sizes)
    model = (
        load_llama(options.model, mesh)
        if options.model
        else Llama.initialized(SMALL, mesh)
    )
    tokens = encode(read_text(options.text), options.model)
    num = sizes["dp"] * sizes["fsdp"]  # sequences of a batch
    if len(tokens) <= options.length + 1:
        raise SystemExit(
            f"the text has {len(tokens)} tokens, a sequence takes {options.length + 1}: give more --text"
        )

    graph, state = nnx.split(model)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(
                0.0, options.learning_rate, 5, max(options.steps, 6)
            ),
            weight_decay=0.1,
        ),
    )
    split = shardings((state, jax.eval_shape(optimizer.init, state)), mesh)
    training = (state, jax.jit(optimizer.init, out_shardings=split[1])(state))
    done = 0
    if options.run.exists():
        done, training = load_checkpoint(options.run, training)
        print(f"resumed after step {done}")

    @partial(jax.jit, out_shardings=(None, split), donate_argnums=0)
    def step(training, batch):
        state, moments = training
        loss, gradients = jax.value_and_grad(mean_loss(graph, mesh))(state, batch)
        updates, moments = optimizer.update(gradients, moments, state)
        return loss, (optax.apply_updates(state, updates), moments)

    for number in range(done, options.steps):
        started = time.perf_counter()
        starts = np.random.default_rng(number).integers(
            0, len(tokens) - options.length - 1, num
        )
        rows = np.stack(
            [tokens[start : start + options.length + 1] for start in starts]
        )
        batch = shard_batch(
            {"input_ids": rows[:, :-1], "shift_labels": rows[:, 1:]}, mesh
        )
        loss, training = step(training, batch)
        print(
            f"step {number + 1:4d}  loss {float(loss):.4f}  {time.perf_counter() - started:.2f} s",
            flush=True,
        )
    if done < options.steps:
        save_checkpoint(options.run, options.steps, training)
        print(f"checkpoint {options.steps} in {options.run}")
    if options.model:
        target = options.run.with_name(options.run.name + "-model")
        save_llama(nnx.merge(graph, training[0]), target, source=options.model)
        print(
            f"model in {target}, for transformers.AutoModelForCausalLM.from_pretrained"
        )


if __name__ == "__main__":
    try:
        main()
    except RingspanError as error:
        raise SystemExit(str(error)) from None
