"""``ringspan prove``: exactness of a model with the options of a step, tried here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ringspan.cli.checks import AsJson, LocalRanks, check_folder, on_ranks
from ringspan.cli.console import console, facts, paragraph, say, silent, table
from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require

if TYPE_CHECKING:
    from ringspan.proof.run import Proof
    from ringspan.train.config.step import AskedStep

DTYPES: Final = ("float64", "float32", "bfloat16")

EPILOG = (
    "Example: ringspan prove --model llama-3.1-8b --ranks 2 attention.route=ulysses memory.checkpoint=full. "
    "On a cluster: torchrun --nnodes 2 --nproc-per-node 8 ... -m ringspan prove --model path/to/model run.toml"
)


def command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="A training file, and settings as key=value, such as memory.checkpoint=full.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A name such as llama-3.1-8b, a config.json, its folder, or a Hub id; default: the training file's.",
            show_default=False,
        ),
    ] = "",
    adapter: Annotated[
        str,
        typer.Option(
            help="Train an adapter: the rank of a LoRA over all linear layers, or a folder of PEFT.",
            show_default=False,
        ),
    ] = "",
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Try the folder's own weights, a layer of each kind in full width, in place of random ones.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype that layers compute in: float64, float32 or bfloat16; default: float64 on CPUs, on GPUs "
            "float32 and the training file's."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a page of the proof, proof.html, with a picture of the positions if it differs.",
            show_default=False,
        ),
    ] = None,
    ranks: LocalRanks = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model like yours on a ring and on one process, and compare: losses, gradients, weights, logits.

    It has a layer of each kind, random weights, and computes in float64. Exit code 0 if all is exact, 1 if anything
    differs, with the place, and 2 if the model or an option is refused.
    """
    from ringspan.measure.machine import default_ranks
    from ringspan.torch.runtime.environment import is_rank

    _check_dtype(dtype)
    if report is not None:
        check_folder("--report", report)
    given = _given(settings or [], model, adapter, dtype, weights=weights)
    nproc = None if is_rank() else default_ranks() if ranks is None else ranks
    proof, is_first = on_ranks(_prove, given, nproc, forks=("ringspan.proof.run",))
    if is_first:
        _show(proof, report, as_json=as_json)
    if not proof.is_exact:
        raise typer.Exit(1)


def _given(
    settings: list[str], model: str, adapter: str, dtype: str | None, *, weights: bool
) -> "Callable[[], tuple[Any, ...]]":
    """Return a call for the arguments of ``_prove``; raise ConfigError for a model or settings that cannot be read."""
    from ringspan.torch.runtime.environment import is_rank
    from ringspan.train.config.step import read_step

    folder, given_rank = _adapter(adapter)
    typed = [*settings, *given_rank]
    step = read_step(typed)
    if not model and not step.is_file:
        raise ConfigError(
            "nothing to prove: give --model, such as --model llama-3.1-8b, or a training file"
        )
    step.settings.adapter.require_extras()
    own = _folder(model or str(step.settings.model.path)) if weights else None
    named = None
    if model and (step.settings.model.trust_remote_code or _has_own_code(model)):
        step = read_step([*typed, f"model.path={json.dumps(model)}"])
    elif model:
        named = _config_of(model)

    def given() -> tuple[Any, ...]:
        if named is None and not is_rank():  # once, before ranks would all raise
            from ringspan.train.model import load_model_config

            load_model_config(step.settings)
        return named, step, dtype, folder, own

    return given


def _show(proof: "Proof", report: Path | None, *, as_json: bool) -> None:
    """Print a proof, and write its page if a folder is given."""
    if as_json:
        print(json.dumps(proof.as_json()))
    else:
        show_proof(proof)
    if report is not None:
        _write_page(report, proof)


def _write_page(folder: Path, proof: "Proof") -> None:
    from ringspan.report.page import write_whole
    from ringspan.report.proof_page import proof_page

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "proof.html", proof_page(proof))
    say(f"page: {folder / 'proof.html'}")


def proof_of(model: str, ranks: int | None) -> "Callable[[], Proof]":
    """Return a call that proves a model with the default options on local ranks; ConfigError for an unknown model."""
    from ringspan.measure.machine import default_ranks
    from ringspan.train.config.step import read_step

    named, step = _config_of(model), read_step([])
    nproc = default_ranks() if ranks is None else ranks

    def given() -> tuple[Any, ...]:
        return named, step, None, "", None

    def prove() -> "Proof":
        return on_ranks(_prove, given, nproc, forks=("ringspan.proof.run",))[0]

    return prove


def _check_dtype(dtype: str | None) -> None:
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype!r}: use one of {', '.join(DTYPES)}")


def _config_of(model: str) -> tuple[str, str]:
    """Return a model's config as JSON, and its name."""
    from ringspan.plan.model.configs import model_shape

    values = _values_of(model)
    if values.get("quantization_config") and values.get("model_type"):
        return json.dumps(values), model  # the planner counts unpacked weights
    shape = model_shape(model)
    return shape.config, shape.name


def _has_own_code(model: str) -> bool:
    """Return whether a folder's config names Python files for a type that transformers lacks."""
    from transformers import CONFIG_MAPPING

    values = _values_of(model)
    return "auto_map" in values and values.get("model_type") not in CONFIG_MAPPING


def _values_of(model: str) -> dict[str, Any]:
    """Return the values of a local config.json; none if there is none that can be read, which others report."""
    from ringspan.core.files.named import read_small

    path = Path(model).expanduser()
    try:
        values = json.loads(read_small(path / "config.json" if path.is_dir() else path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _folder(model: str) -> str:
    """Return the folder or Hub id whose weights are tried."""
    if "/" not in model and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"--weights: {model!r} is a config without weights; give --model a folder or a Hub id"
        )
    return model


def _adapter(text: str) -> tuple[str, list[str]]:
    """Return the folder of an adapter, or the setting of a training file for its rank."""
    if not text or text.isdecimal():
        return "", [f"adapter.rank={text}"] if text else []
    if not Path(text).expanduser().is_dir():
        raise ConfigError(
            f"--adapter {text!r}: give the rank of a LoRA, such as 16, or the folder of an adapter"
        )
    require("an adapter", "peft")
    return text, []


def _prove(
    named: tuple[str, str] | None,
    step: "AskedStep",
    dtype: str | None,
    folder: str,
    own: str | None,
) -> "Proof":
    """Prove on this rank; the first one says what it is at."""
    import torch.distributed as dist

    from ringspan.plan.model.reader import config_of
    from ringspan.proof.run import Asked, dtypes_named, prove_on
    from ringspan.torch.runtime.dtypes import dtype_named
    from ringspan.torch.runtime.mesh import init_mesh
    from ringspan.train.adapter import lora_config, read_adapter
    from ringspan.train.model import load_model_config

    settings = step.settings
    if named is None:
        config = load_model_config(settings)
        name = settings.model.path or config.model_type
    else:
        text, name = named
        config = config_of(json.loads(text), name)
    parameters = dtype_named(settings.model.parameter_dtype)
    trained = dtypes_named(dtype_named(settings.model.dtype), parameters)
    asked = Asked(
        config=config,
        name=name,
        options=step.options,
        adapter=read_adapter(folder) if folder else lora_config(settings.adapter),
        dtypes=dtypes_named(dtype_named(dtype), parameters) if dtype else (),
        trained=trained,
        weights=own,
        tree=settings.data.shared_prefix,
        not_tried=step.not_tried,
    )
    doing = say if dist.get_rank() == 0 else silent
    return prove_on(init_mesh(**step.sizes), asked, doing)


def show_proof(proof: "Proof") -> None:
    """Print what was tried, a row for each batch, the place of a difference, and what was not tried."""
    out = console()
    sizes = " x ".join(f"{name} {size}" for name, size in proof.mesh.items())
    options = ", ".join(f"{name}={value}" for name, value in proof.options.items())
    weights = "random weights" if proof.weights == "random" else "its own weights"
    tried = f"{proof.layers} layers, {proof.parameters:,} parameters, {weights}"
    rows = [("tried", tried), ("mesh", sizes), ("options", options or "the defaults")]
    facts(out, proof.model, rows)
    shown = [
        [row.batch, row.dtype, f"refused: {row.refused}", "", ""]
        if row.error is None
        else [row.batch, row.dtype, f"{row.error:.1e}", f"{row.bound:.0e}", row.of]
        for row in proof.rows
    ]
    headers = ["batch", "dtype", "worst error", "bound", "of"]
    table(out, "against plain transformers on one process", headers, shown)
    if proof.is_exact:
        paragraph(out, f"exact, in {proof.seconds:.0f} s", style="green")
    else:
        _show_difference(out, proof)
    paragraph(out, f"not tried: {'; '.join(proof.not_tried)}")


def _show_difference(out: Any, proof: "Proof") -> None:
    """Print the place at which a proof first differs, and the options that it takes."""
    wrong = next(row for row in proof.rows if not row.is_exact)
    place = wrong.place or wrong.of
    paragraph(out, f"differs: {wrong.batch}, first at {place}", style="red")
    needed = ", ".join(
        f"{key}={value}" for key, value in (proof.smallest or {}).items()
    )
    paragraph(out, f"the fewest options with which it does: {needed or 'the defaults'}")
