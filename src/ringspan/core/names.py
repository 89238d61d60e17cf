"""Every list of names that a user chooses from, once."""

from typing import Final, Literal, TypeVar, get_args

from ringspan.core.errors import ConfigError, RingspanError, UnsupportedError

LayoutName = Literal["contiguous", "striped", "zigzag"]
# ``balanced`` depends on the documents of a sequence.
BatchLayoutName = Literal["contiguous", "striped", "zigzag", "balanced"]
RouteName = Literal["ring", "bidirectional", "double-ring", "all-gather", "pass-q"]
# In order from the fastest to the most frugal.
CheckpointName = Literal["none", "attention", "full"]
OffloadName = Literal["none", "activations"]
# ``dense`` is over all keys, ``sparse`` over the chosen ones.
IndexLossName = Literal["none", "dense", "sparse"]
# How a step's sequences are dealt to the replicas that work at the same time.
BalanceName = Literal["none", "flops"]
ReplayName = Literal["rollout", "old"]
CommDtypeName = Literal["exact", "bfloat16", "float8", "int8"]
GradientCommDtypeName = Literal["exact", "bfloat16"]
CacheDtypeName = Literal["float32", "bfloat16", "fp8", "int8", "int4"]
WeightsName = Literal["auto", "whole", "sharded"]  # while generating
KernelName = Literal[
    "auto", "cudnn", "flash", "flash2", "flash3", "flash4", "triton", "cpu", "eager"
]
JaxKernelName = Literal["xla", "pallas", "triton"]
LossName = Literal["auto", "blockwise", "liger"]
# How often the loss counts a token that branches of a tree share.
PrefixLossName = Literal["once", "each", "none"]
# ``none`` keeps the loss of each token.
ReductionName = Literal["sum", "none"]
DtypeName = Literal["float32", "bfloat16"]
# What memory is used for.
Category = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "communication",
]
ChunkTokens = int | Literal["auto"]
ExpertSlices = int | Literal["auto"]

LAYOUT_NAMES: Final[tuple[LayoutName, ...]] = get_args(LayoutName)
BATCH_LAYOUT_NAMES: Final[tuple[BatchLayoutName, ...]] = get_args(BatchLayoutName)
# ``ulysses`` is a prefix: another route runs between its groups.
ROUTE_NAMES: Final[tuple[str, ...]] = (
    *get_args(RouteName),
    "ulysses",
)
CHECKPOINT_NAMES: Final[tuple[CheckpointName, ...]] = get_args(CheckpointName)
OFFLOAD_NAMES: Final[tuple[OffloadName, ...]] = get_args(OffloadName)
COMM_DTYPE_NAMES: Final[tuple[CommDtypeName, ...]] = get_args(CommDtypeName)
GRADIENT_COMM_DTYPE_NAMES: Final[tuple[GradientCommDtypeName, ...]] = get_args(
    GradientCommDtypeName
)
CACHE_DTYPE_NAMES: Final[tuple[CacheDtypeName, ...]] = get_args(CacheDtypeName)
WEIGHTS_NAMES: Final[tuple[WeightsName, ...]] = get_args(WeightsName)
KERNEL_NAMES: Final[tuple[KernelName, ...]] = get_args(KernelName)
JAX_KERNEL_NAMES: Final[tuple[JaxKernelName, ...]] = get_args(JaxKernelName)
LOSS_NAMES: Final[tuple[LossName, ...]] = get_args(LossName)
PREFIX_LOSS_NAMES: Final[tuple[PrefixLossName, ...]] = get_args(PrefixLossName)
REDUCTION_NAMES: Final[tuple[ReductionName, ...]] = get_args(ReductionName)
INDEX_LOSS_NAMES: Final[tuple[IndexLossName, ...]] = get_args(IndexLossName)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)

_Name = TypeVar("_Name", bound=str)


def find_name(
    what: str, name: object, names: tuple[_Name, ...], error: type[RingspanError]
) -> _Name:
    """Return ``name`` if it is one of ``names``, else raise the given error."""
    for known in names:
        if isinstance(name, str) and name == known:
            return known
    raise error(f"unknown {what} {name!r}; choose one of {', '.join(names)}")


def checkpoint_name(name: str) -> CheckpointName:
    return find_name("checkpoint policy", name, CHECKPOINT_NAMES, ConfigError)


def offload_name(name: str) -> OffloadName:
    return find_name("offload", name, OFFLOAD_NAMES, ConfigError)


def kernel_name(name: str) -> KernelName:
    return find_name("kernel", name, KERNEL_NAMES, UnsupportedError)
