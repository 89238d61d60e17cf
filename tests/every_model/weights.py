"""The weights of a tiny model of any type, from a folder onto the ring and back, against the way of transformers.

``python -m tests.every_model.weights`` tries every type that runs; ``benchmarks/results/weights-models.json``.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import ringspan as rs
from ringspan.torch.runtime.forks import serve_forks
from tests.every_model.tiny import MULTIMODAL, tiny_model
from tests.pool import Pool

MODELS: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "models.json"
RESULTS: Final = MODELS.with_name("weights-models.json")
SMALL_FILES = "60KB"


def written(kind: str, folder: Path) -> None:
    """A tiny model's folder, as transformers writes it, in several files."""
    tiny_model(kind).save_pretrained(folder, max_shard_size=SMALL_FILES)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors in the files of a folder, by the names that they have there."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys(), f"{path}: has what another file has"
        found |= tensors
    return found


def whole_model(model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer under every name that it has."""
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        for name, x in named
    }


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same bit for bit."""
    names = sorted(found.keys() ^ expected.keys())
    return names + [
        name
        for name in sorted(found.keys() & expected.keys())
        if found[name].dtype != expected[name].dtype
        or not torch.equal(_bits(found[name]), _bits(expected[name]))
    ]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x


def there_and_back(
    mesh: DeviceMesh, source: str, target: str, **options: Any
) -> dict[str, list[str]]:
    """Onto the ring and back into a folder: what is not as transformers has it, by what was done."""
    alone: Any = AutoModelForCausalLM.from_pretrained(source)
    if not alone.supports_gradient_checkpointing:
        options["checkpoint"] = "none"
    model: Any = rs.from_pretrained(source, mesh, **options)
    wrong = {"loaded": differences(whole_model(model), whole_model(alone))}
    tied = [
        [a is b for a in each.parameters() for b in each.parameters()]
        for each in (model, alone)
    ]
    wrong["tied"] = [] if tied[0] == tied[1] else ["other weights are tied"]
    configs = [
        each.generation_config.to_dict() if each.can_generate() else {}
        for each in (model, alone)
    ]
    wrong["configured"] = [] if configs[0] == configs[1] else ["generation_config"]
    model.save_pretrained(target, max_shard_size=SMALL_FILES)
    with tempfile.TemporaryDirectory() as scratch:
        alone.save_pretrained(scratch, max_shard_size=SMALL_FILES)
        if mesh.get_rank() == 0:  # transformers does not write on others
            wrong["saved"] = differences(stored(Path(target)), stored(Path(scratch)))
    handed = dict(rs.named_weights(model, everywhere=True))
    wrong["handed over"] = differences(handed, stored(Path(target)))
    again: Any = AutoModelForCausalLM.from_pretrained(target)
    wrong["opened"] = differences(whole_model(again), whole_model(alone))
    return {what: names for what, names in wrong.items() if names}


def judge(pool: Pool, kind: str, *, with_tp: bool) -> dict[str, Any]:
    """Whether the weights of a model type go from files onto rings and back as transformers has them."""
    shapes = [(2, 1), (3, 1)] + ([(4, 2)] if with_tp else [])
    for ranks, tp in shapes:
        with tempfile.TemporaryDirectory() as scratch:
            given, saved = Path(scratch, "given"), Path(scratch, "saved")
            written(kind, given)
            try:
                AutoModelForCausalLM.from_pretrained(given)
            except (
                Exception
            ) as error:  # whatever it raises: transformers cannot read what it wrote
                return {
                    "refused": f"not by transformers either: {str(error).partition(chr(10))[0][:120]}"
                }
            outcomes = pool.outcomes(
                there_and_back, ranks, str(given), str(saved), tp=tp
            )
        if failures := [
            outcome for outcome in outcomes if isinstance(outcome, BaseException)
        ]:
            return {"failed": str(failures[0])}
        if any(outcomes):
            return {"failed": f"{ranks} ranks, tp {tp}: {next(filter(None, outcomes))}"}
    return {"same": [f"{ranks} ranks, tp {tp}" for ranks, tp in shapes]}


def is_text(row: dict[str, Any]) -> bool:
    """Whether a row of docs/models.md is of a causal language model that runs."""
    return "error" in row.get("sequence", {}) and not row["kind"].endswith(MULTIMODAL)


def main(kinds: list[str]) -> int:
    """Try the kinds, or all causal language models that run and were not the same before; 1 where one fails."""
    serve_forks("ringspan.train.loop", "transformers.models.llama.modeling_llama")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {
        row["kind"]: row
        for row in json.loads(MODELS.read_text())["rows"]
        if is_text(row)
    }
    pool = Pool()
    for kind in kinds or [kind for kind in rows if "same" not in known.get(kind, {})]:
        known[kind] = judge(pool, kind, with_tp="error" in rows[kind].get("tp", {}))
        print(kind, known[kind], flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    pool.close()
    return int(any("failed" in outcome for outcome in known.values()))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from tests.every_model import weights

    sys.exit(weights.main(sys.argv[1:]))
