"""The table of torch's private names: complete, true of this release, and what a release without one is told."""

import ast
from pathlib import Path

import pytest
import torch

from ringspan.core.errors import UnsupportedError
from ringspan.torch.runtime import seams
from ringspan.torch.runtime.requirements import pip_command, shown, supported

SOURCE = Path(seams.__file__).parents[1]
# Private by their underscore, and as old as the classes that have them: of modules, tensors, storages, named tuples,
# operators and the standard library. FSDP, process groups, meshes and the engine of autograd are in the table.
LASTING = {
    "_C", "_apply", "_asdict", "_backward_hooks", "_buffers", "_cdata", "_exit", "_fields", "_flash_attention_backward",
    "_flash_attention_forward", "_local_scalar_dense", "_make", "_make_wrapper_subclass", "_modules",
    "_non_persistent_buffers_set", "_parameters", "_replace", "_save_to_state_dict", "_schema", "_sequence_nr",
    "_to_copy", "_version", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_is_amx_tile_supported", "_is_avx512_bf16_supported",
}  # fmt: skip
# Of transformers, PEFT, FlashAttention, multiprocessing's fork server, and of our own classes.
OTHERS = {
    "_attn_implementation", "_experts_implementation", "_get_feat_extract_output_lengths",
    "_gradient_checkpointing_func", "_flash_attn_backward", "_flash_attn_bwd", "_flash_attn_forward", "_flash_attn_fwd",
    "_flash_attn_varlen_backward", "_flash_attn_varlen_forward", "_forkserver", "_forkserver_alive_fd", "_timeout",
    "_before", "_did_swap_in_out_features", "_from_config", "_wanted", "_weight_conversions",
}  # fmt: skip


def private_names() -> set[str]:
    """The private attributes that ``ringspan.torch`` and families take from objects other than its own ``self``."""
    nodes = (
        node
        for folder in (SOURCE, SOURCE.parent / "families")
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    taken = (
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    )
    others = (
        node
        for node in taken
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    )
    return {node.attr for node in others if not node.attr.startswith("__")}


def listed() -> set[str]:
    return {
        name
        for names in seams.SEAMS.values()
        for either in names
        for name in either.split("|")
    }


def test_every_private_name_is_in_the_table():
    assert private_names() - LASTING - OTHERS - listed() == set()
    private = {name for name in listed() if name.startswith("_")}
    assert private - private_names() == set(), "the table lists what nothing uses"
    assert (LASTING | OTHERS) - private_names() == set()


def test_this_release_has_all_of_them():
    assert [*seams.missing()] == []


CASES = [(place, name) for place, names in seams.SEAMS.items() for name in names]


@pytest.mark.parametrize(("place", "names"), CASES, ids=lambda x: x.rpartition(":")[2])
def test_a_release_without_a_name_is_refused_by_it(monkeypatch, place, names):
    has = seams._has
    owner = seams._owner(*place.partition(":")[::2])
    without = names.split("|")
    monkeypatch.setattr(
        seams,
        "_has",
        lambda of, name: not (of is owner and name in without) and has(of, name),
    )
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    about = seams.SEAMS[place][names]
    # this release may lack what 2.13 has
    monkeypatch.setattr(seams, "SEAMS", {place: {names: about}})
    seams.check_torch.cache_clear()
    try:
        if isinstance(about, dict) and "until" in about:
            assert seams.check_torch() is None
        else:
            with pytest.raises(
                UnsupportedError,
                match=f"torch 2.16.0 lacks .*{without[0]}, which ringspan needs: pip",
            ):
                seams.check_torch()
    finally:
        seams.check_torch.cache_clear()


def test_a_module_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(
        seams, "SEAMS", {"torch.no_such_module:Group": {"reshard": "returns shards"}}
    )
    assert [*seams.missing()] == ["Group.reshard"]


def test_names_that_methods_set_count():
    class Group:
        def __init__(self):
            self._set = self.read_elsewhere._read

    assert seams._has(Group, "_set") and not seams._has(Group, "_read")


def test_the_remedy_is_what_pyproject_declares():
    assert shown(supported("torch")).startswith(">=2.11,<2.")
    assert pip_command("torch") == f"pip install 'torch{shown(supported('torch'))}'"
    assert "2.11" in supported("torch") and "2.10" not in supported("torch")
    assert shown(supported("no-such-package")) == ""
