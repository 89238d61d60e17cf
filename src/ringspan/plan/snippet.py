"""A setting to paste: tables of a training file, the command, the call in Python."""

import json
from typing import Any

from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.plan.cost.setting import Setting
from ringspan.plan.generation.cost import Text
from ringspan.plan.search import Question


def toml_tables(question: Question, setting: Setting) -> str:
    """Return a training file's tables except [model] and [data], without defaults."""
    mesh = {"ring": setting.ring, "replicate": setting.replicate} | (
        {"tp": setting.tp} if setting.tp > 1 else {}
    )
    optimizer: dict[str, Any] = {
        "batch_size": setting.batch,
        "accumulation_steps": setting.micro_steps(question.batch),
    }
    if setting.optimizer_on_host:
        optimizer["on_host"] = True
    if setting.optimizer_state != "float32":
        optimizer["state"] = setting.optimizer_state
    tables = {
        "mesh": mesh,
        "attention": _sent(setting),
        "memory": _kept(setting),
        "optimizer": optimizer,
    }
    if question.shape.lora:
        tables["adapter"] = {"rank": question.shape.lora}
    lines = (
        [f"[{name}]", *(f"{key} = {json.dumps(x)}" for key, x in table.items())]
        for name, table in tables.items()
    )
    return "\n\n".join(map("\n".join, lines))


def train_command(
    question: Question, setting: Setting, file: str, *, documents: bool = False
) -> str:
    """Return the command that trains with ``file``, with overrides for [model], [data] and packed ``documents``."""
    start = start_command(
        f"ringspan train {file}", question.devices, question.device.devices_per_node
    )
    overrides = f"model.dtype={setting.compute_dtype} data.sequence_length_tokens={setting.length}"
    return f"{start} \\\n    {overrides}" + (
        " data.documents=separate" if documents else ""
    )


def start_command(command: str, ranks: int, per_node: int) -> str:
    """Return the command for these ranks: it starts one node's ranks itself, several nodes' by torchrun."""
    if ranks <= per_node:
        return f"{command} --nproc {ranks}"
    # torchrun starts the same number on every node: take the fewest nodes that divide the ranks.
    nodes = next(
        nodes for nodes in range(-(-ranks // per_node), ranks + 1) if ranks % nodes == 0
    )
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} ... -m {command}"
    )


def mesh_call(mesh: Setting | Text) -> str:
    axes = {"ring": mesh.ring, "replicate": mesh.replicate, "tp": mesh.tp}
    return f"rs.init_mesh({', '.join(f'{axis}={size}' for axis, size in axes.items() if axis == 'ring' or size > 1)})"


def python_call(setting: Setting) -> str:
    """Return the Python code that parallelizes a model and shards a batch with this setting."""
    options = _sent(setting) | _kept(setting)
    folds = f", folds={setting.folds}" if setting.folds > 1 else ""
    lines = [
        "import torch",
        "import ringspan as rs",
        "",
        f"mesh = {mesh_call(setting)}",
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
    if setting.optimizer_state != "float32":
        lines.append(
            f"optimizer = torchao.optim.AdamW{setting.optimizer_state}(model.parameters())"
        )
    return "\n".join(lines)


def _sent(setting: Setting) -> dict[str, Any]:
    sent = {"layout": setting.layout, "route": setting.route}
    return sent if setting.sent_as.is_exact else sent | setting.sent_as.as_argument


def _kept(setting: Setting) -> dict[str, Any]:
    kept: dict[str, Any] = {"checkpoint": setting.checkpoint}
    if setting.checkpoint != "none":
        kept["layers_per_checkpoint"] = setting.layers_per_checkpoint
    if setting.folds > 1:
        kept["folds"] = setting.folds
    # With checkpoints the default already runs feed-forwards in chunks.
    if setting.feedforward_tokens != (
        0 if setting.checkpoint == "none" else FREE_CHUNK_TOKENS
    ):
        kept["feedforward_chunk_tokens"] = setting.feedforward_tokens
    if setting.expert_slices != 1:
        kept["expert_slices"] = setting.expert_slices
    if setting.offload != "none":
        kept["offload"] = setting.offload
    return kept
