"""A setting to paste: tables of a training file, the command, the call in Python."""

import json
from typing import Any

from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.plan.cost.setting import Setting
from ringspan.plan.search import Question


def toml_tables(question: Question, setting: Setting) -> str:
    """Return a training file's tables except [model] and [data], without defaults."""
    mesh = {"ring": setting.ring, "replicate": setting.replicate} | ({"tp": setting.tp} if setting.tp > 1 else {})
    optimizer: dict[str, Any] = {"batch_size": setting.batch, "accumulation_steps": setting.micro_steps(question.batch)}
    if setting.optimizer_on_host:
        optimizer["on_host"] = True
    tables = {"mesh": mesh, "attention": _sent(setting), "memory": _kept(setting), "optimizer": optimizer}
    if question.shape.lora:
        tables["adapter"] = {"rank": question.shape.lora}
    lines = ([f"[{name}]", *(f"{key} = {json.dumps(x)}" for key, x in table.items())] for name, table in tables.items())
    return "\n\n".join(map("\n".join, lines))


def train_command(question: Question, setting: Setting, file: str, *, documents: bool = False) -> str:
    """Return the command that trains with ``file``, with overrides for [model], [data] and packed ``documents``."""
    start = f"ringspan train {file} --nproc {question.devices}"
    if question.devices > question.device.devices_per_node:
        # As many on every node: the fewest nodes among which the devices come out even.
        nodes = -(-question.devices // question.device.devices_per_node)
        while question.devices % nodes:
            nodes += 1
        per_node = question.devices // nodes
        start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} ... -m ringspan train {file}"
    overrides = f"model.dtype={setting.compute_dtype} data.sequence_length_tokens={setting.length}"
    return f"{start} \\\n    {overrides}" + (" data.documents=separate" if documents else "")


def python_call(setting: Setting) -> str:
    axes = {"ring": setting.ring, "replicate": setting.replicate, "tp": setting.tp}
    mesh = ", ".join(f"{axis}={size}" for axis, size in axes.items() if axis == "ring" or size > 1)
    options = _sent(setting) | _kept(setting)
    folds = f", folds={setting.folds}" if setting.folds > 1 else ""
    lines = [
        "import torch",
        "import ringspan as rs",
        "",
        f"mesh = rs.init_mesh({mesh})",
        "model = rs.parallelize(",
        "    model,",
        "    mesh,",
        *(f"    {name}={json.dumps(value)}," for name, value in options.items()),
        f"    compute_dtype=torch.{setting.compute_dtype},",
        ")",
        f"batch = rs.shard_batch(batch, mesh, layout={json.dumps(setting.layout)}{folds})",
    ]
    if setting.optimizer_on_host:
        lines.append("optimizer = rs.HostAdamW(model.parameters())")
    return "\n".join(lines)


def _sent(setting: Setting) -> dict[str, Any]:
    sent = {"layout": setting.layout, "route": setting.route}
    return sent if setting.comm_dtype == "exact" else sent | {"comm_dtype": setting.comm_dtype}


def _kept(setting: Setting) -> dict[str, Any]:
    kept: dict[str, Any] = {"checkpoint": setting.checkpoint}
    if setting.checkpoint != "none":
        kept["layers_per_checkpoint"] = setting.layers_per_checkpoint
    if setting.folds > 1:
        kept["folds"] = setting.folds
    # With a checkpoint the default already cuts feed-forwards, where a model's can be cut for free.
    if setting.feedforward_tokens != (0 if setting.checkpoint == "none" else FREE_CHUNK_TOKENS):
        kept["feedforward_chunk_tokens"] = setting.feedforward_tokens
    if setting.offload != "none":
        kept["offload"] = setting.offload
    return kept
