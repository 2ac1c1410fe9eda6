"""What can go wrong, as values.

    KVRegError
    ├── RegistrationRejected (ValueError)    what was offered cannot be served; carries every Rejection of a stage
    ├── TransferError                        the backend could not register a plan
    │   ├── TransferUnavailable              trying again can help: not reachable, no answer in time
    │   └── TransferRefused                  trying again cannot help: the backend said no
    ├── SnapshotInvalid (ValueError)         a file is not a snapshot of a registration
    ├── PreflightImpossible                  a model and flags that no engine would start with, or that cannot be planned here
    ├── EngineUnsupported                    the engine does not describe its KV caches in a form that is read
    └── RuleRejected                         a rule's or check's verdict on one layer; a stage turns it into a Rejection

An error's constructor arguments are its `args`, so each survives pickling; `str()` is one line, because that line is
all that crosses vLLM's process boundary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool | tuple["Fact", ...] | None
Facts: TypeAlias = Mapping[str, Fact]


class Stage(StrEnum):
    """The stages, in the order they run."""

    VALIDATE = "validate"
    EDIT = "edit"
    ENGINE_GROUP_INFO = "engine-group-info"
    TRANSFER_REGISTER = "transfer-register"


class Reason(StrEnum):
    """Every cause of a refusal or a failed transfer. Closed: a metric label and a row of `HINTS` per member."""

    # The engine's groups
    CROSS_ATTENTION = "cross_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    MAMBA_CACHE_MODE = "mamba_cache_mode"
    UNKNOWN_KIND = "unknown_kind"
    HOST_RESIDENT = "host_resident"
    LAYER_IN_TWO_GROUPS = "layer_in_two_groups"
    LAYER_WITHOUT_CACHE = "layer_without_cache"
    LAYER_WITHOUT_SPEC = "layer_without_spec"
    CACHE_WITHOUT_GROUP = "cache_without_group"
    AUX_POOL_NAME = "aux_pool_name"
    CHUNK_SIZE = "chunk_size"
    # The layout
    UNKNOWN_LAYOUT = "unknown_layout"
    SCATTERED_LAYOUT = "scattered_layout"
    # The registered tensors
    BLOCK_DIM_AMBIGUOUS = "block_dim_ambiguous"
    PAGES_PER_BLOCK = "pages_per_block"
    PAGE_TOO_SMALL = "page_too_small"
    PAGE_TOO_LARGE = "page_too_large"
    PAST_STORAGE = "past_storage"
    STATE_STRIDES = "state_strides"
    STATES_APART = "states_apart"
    PADDED_KERNEL_PAGES = "padded_kernel_pages"
    SCATTERED_BLOCK = "scattered_block"
    WIDTH = "width"
    # The proof
    NOT_A_VIEW = "not_a_view"
    UNREADABLE_VIEW = "unreadable_view"
    BLOCK_COUNT = "block_count"
    BLOCK_STRIDE = "block_stride"
    SLOTS_PER_BLOCK = "slots_per_block"
    BYTES_MISSED = "bytes_missed"
    BYTES_OF_ANOTHER_BLOCK = "bytes_of_another_block"
    BYTES_BEYOND_PADDING = "bytes_beyond_padding"
    BYTES_OF_ANOTHER_LAYER = "bytes_of_another_layer"
    TRANSFER_IDENTITY_SHARED = "transfer_identity_shared"
    # The transfer
    ALREADY_REGISTERED = "already_registered"
    NOTHING_TO_REGISTER = "nothing_to_register"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_UNREACHABLE = "transfer_unreachable"
    TRANSFER_REFUSED = "transfer_refused"
    SERVER_DISAGREES = "server_disagrees"
    TRANSFER_MODE = "transfer_mode"
    SHARED_MEMORY = "shared_memory"
    PADDED_PAGES_ON_CPU = "padded_pages_on_cpu"
    PREFIX_UNREAD = "prefix_unread"
    SHUTTING_DOWN = "shutting_down"


REASONS: Mapping[Stage, frozenset[Reason]] = {
    Stage.VALIDATE: frozenset(
        {
            Reason.CROSS_ATTENTION,
            Reason.ENCODER_ONLY_ATTENTION,
            Reason.MAMBA_CACHE_MODE,
            Reason.UNKNOWN_KIND,
            Reason.HOST_RESIDENT,
            Reason.LAYER_IN_TWO_GROUPS,
            Reason.LAYER_WITHOUT_CACHE,
            Reason.LAYER_WITHOUT_SPEC,
            Reason.CACHE_WITHOUT_GROUP,
            Reason.AUX_POOL_NAME,
            Reason.CHUNK_SIZE,
            Reason.UNKNOWN_LAYOUT,
            Reason.SCATTERED_LAYOUT,
            Reason.BLOCK_DIM_AMBIGUOUS,
            Reason.PAGES_PER_BLOCK,
            Reason.PAGE_TOO_SMALL,
            Reason.PAGE_TOO_LARGE,
            Reason.PAST_STORAGE,
            Reason.STATE_STRIDES,
            Reason.STATES_APART,
            Reason.SCATTERED_BLOCK,
        }
    ),
    Stage.EDIT: frozenset(
        {
            Reason.PAGE_TOO_LARGE,
            Reason.PAST_STORAGE,
            Reason.PADDED_KERNEL_PAGES,
            Reason.SCATTERED_BLOCK,
            Reason.WIDTH,
            Reason.NOT_A_VIEW,
            Reason.UNREADABLE_VIEW,
            Reason.BLOCK_COUNT,
            Reason.BLOCK_STRIDE,
            Reason.SLOTS_PER_BLOCK,
            Reason.BYTES_MISSED,
            Reason.BYTES_OF_ANOTHER_BLOCK,
            Reason.BYTES_BEYOND_PADDING,
            Reason.BYTES_OF_ANOTHER_LAYER,
            Reason.TRANSFER_IDENTITY_SHARED,
        }
    ),
    Stage.ENGINE_GROUP_INFO: frozenset(),
    Stage.TRANSFER_REGISTER: frozenset(
        {
            Reason.ALREADY_REGISTERED,
            Reason.NOTHING_TO_REGISTER,
            Reason.TRANSFER_TIMEOUT,
            Reason.TRANSFER_UNREACHABLE,
            Reason.TRANSFER_REFUSED,
            Reason.SERVER_DISAGREES,
            Reason.TRANSFER_MODE,
            Reason.SHARED_MEMORY,
            Reason.PADDED_PAGES_ON_CPU,
            Reason.PREFIX_UNREAD,
            Reason.SHUTTING_DOWN,
        }
    ),
}
"""Which stage gives which reason; what is proven can be grouped, so grouping refuses nothing. Series are made of these alone."""

HINTS: Mapping[Reason, str] = {
    Reason.CROSS_ATTENTION: "encoder-decoder caches cannot be reused by token prefix: serve this model without a KV connector",
    Reason.ENCODER_ONLY_ATTENTION: "encoder-only layers keep no KV cache to reuse: serve this model without a KV connector",
    Reason.MAMBA_CACHE_MODE: "mode {mode!r} keeps no reusable state: use --mamba-cache-mode align (or all) with --enable-prefix-caching; "
    "vLLM silently resets the mode to none when prefix caching is off",
    Reason.UNKNOWN_KIND: "no rule knows this kind of cache: run kvreg check on its snapshot, and add a rule (CONTRIBUTING.md) or serve without a KV connector",
    Reason.HOST_RESIDENT: "this group's blocks live in host memory, which no transfer backend serves yet: turn host-resident KV off",
    Reason.LAYER_IN_TWO_GROUPS: "one layer has one block id space: report the engine's kv_cache_config with this snapshot",
    Reason.LAYER_WITHOUT_CACHE: "the engine names a layer but registered no tensor for it: report its kv_cache_config with this snapshot",
    Reason.LAYER_WITHOUT_SPEC: "the group's per-layer specs miss this layer: report the engine's kv_cache_config with this snapshot",
    Reason.CACHE_WITHOUT_GROUP: "the cache is in no group and aliases no grouped layer, so no block ids reach it: report this snapshot",
    Reason.AUX_POOL_NAME: "name auxiliary pools cb.aux_pool.<tokens>[.<label>] with a positive integer <tokens>, one tensor [blocks, slots, width] each",
    Reason.CHUNK_SIZE: "set LMCache's chunk size to {smallest_valid_chunk_tokens} tokens or a multiple of it",
    Reason.UNKNOWN_LAYOUT: "set VLLM_KV_CACHE_LAYOUT to one of {known}, or upgrade kvreg",
    Reason.SCATTERED_LAYOUT: "set VLLM_KV_CACHE_LAYOUT to one of {served}: in this layout a block is not one run of bytes per layer",
    Reason.BLOCK_DIM_AMBIGUOUS: "with two blocks the shape does not say which dimension counts blocks: give the engine more KV cache memory",
    Reason.PAGES_PER_BLOCK: "rows must be a whole multiple of blocks (exactly one for recurrent state): report this snapshot",
    Reason.PAGE_TOO_SMALL: "the registered tensor holds fewer bytes a block than the spec's page: report this snapshot",
    Reason.PAGE_TOO_LARGE: "the registered tensor holds more bytes a block than the spec's page: report this snapshot",
    Reason.PAST_STORAGE: "the storage is smaller than the blocks cut from it: report this snapshot",
    Reason.STATE_STRIDES: "the states of one page must step by the same page stride: report this snapshot",
    Reason.STATES_APART: "the states of one block must lie in one page of one storage: report this snapshot",
    Reason.PADDED_KERNEL_PAGES: "padding lies between the kernel pages of one block: set --block-size to the backend's kernel block size",
    Reason.SCATTERED_BLOCK: "one block is {runs} separate runs of bytes, and a transfer copies one (or K and V): choose layout NHD, HND, BLNHC or BLHNC",
    Reason.WIDTH: "the block's bytes do not divide by its slots and its padding has no room to round up: choose another --block-size",
    Reason.NOT_A_VIEW: "the rule returned memory that is not the engine's: fix the rule, kvreg never copies",
    Reason.UNREADABLE_VIEW: "the transfer kernels have no page format for this view: add a rule (CONTRIBUTING.md)",
    Reason.BLOCK_COUNT: "the transfer would count other blocks than the scheduler: add or fix a rule (CONTRIBUTING.md)",
    Reason.BLOCK_STRIDE: "the transfer would step by another stride than the engine's blocks: add or fix a rule (CONTRIBUTING.md)",
    Reason.SLOTS_PER_BLOCK: "the transfer would read another number of slots a block: add or fix a rule (CONTRIBUTING.md)",
    Reason.BYTES_MISSED: "the transfer would leave out bytes of the block: add or fix a rule (CONTRIBUTING.md)",
    Reason.BYTES_OF_ANOTHER_BLOCK: "the transfer would touch another block's bytes: add or fix a rule (CONTRIBUTING.md)",
    Reason.BYTES_BEYOND_PADDING: "the transfer would reach beyond the block's own padding: add or fix a rule (CONTRIBUTING.md)",
    Reason.BYTES_OF_ANOTHER_LAYER: "the transfer would touch bytes of another layer with the same block ids: add or fix a rule (CONTRIBUTING.md)",
    Reason.TRANSFER_IDENTITY_SHARED: "the transfer would merge layers of different strides or windows, and the page cannot be told apart: add a rule (CONTRIBUTING.md)",
    Reason.ALREADY_REGISTERED: "unregister this worker's caches before registering them again",
    Reason.NOTHING_TO_REGISTER: "no layer of this worker can be transferred: serve this model without a KV connector",
    Reason.TRANSFER_TIMEOUT: "the backend did not answer within {timeout_s} s: check that it is up, then raise kvreg.register_timeout_s",
    Reason.TRANSFER_UNREACHABLE: "check that the transfer backend is up and that its address is right",
    Reason.TRANSFER_REFUSED: "the backend's own words say why: fix that, trying again will not help",
    Reason.SERVER_DISAGREES: "this LMCache reads the views otherwise than they were proven: install an LMCache release that kvreg supports (docs/operations.md)",
    Reason.TRANSFER_MODE: "set lmcache.mp.mp_transfer_mode (or LMCACHE_MP_TRANSFER_MODE) to lmcache_driven, and run the server with --supported-transfer-mode lmcache_driven",
    Reason.SHARED_MEMORY: "on CPU the caches must move into {path}: give it room for all of them (docker run --shm-size, or a Kubernetes emptyDir of medium Memory)",
    Reason.PADDED_PAGES_ON_CPU: "LMCache's server copies only unpadded pages on CPU: use {geometry}; or a GPU",
    Reason.PREFIX_UNREAD: "vLLM turns prefix caching off here because its MLA kernels on this CPU do not compute on from a cached prefix: serve this model without a KV connector, or on a GPU",
    Reason.SHUTTING_DOWN: "the engine is stopping: nothing to do",
}

_NAMED_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Rejection:
    """One refusal: which layers of which group, by which stage (and rule, if one had matched), why, and the facts."""

    stage: Stage
    reason: Reason
    rule: str | None = None
    group: int | None = None
    layer_names: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)

    @property
    def hint(self) -> str:
        """The way out, in one sentence."""
        facts = {name: _fact(value) if isinstance(value, tuple) else value for name, value in self.facts.items()}
        return _one_line(HINTS[self.reason].format_map(_Facts(facts)))

    @property
    def message(self) -> str:
        """Stage, rule, group, layers, reason and facts, in one line."""
        where = [f"rule {self.rule}"] if self.rule else []
        where += [f"group {self.group}"] if self.group is not None else []
        if self.layer_names:
            more = len(self.layer_names) - _NAMED_LAYERS
            where.append(f"layers {', '.join(self.layer_names[:_NAMED_LAYERS])}" + (f" and {more} more" if more > 0 else ""))
        facts = " ".join(f"{name}={_fact(value)}" for name, value in self.facts.items())
        return _one_line(f"{self.stage}: " + "".join(f"{part}: " for part in where) + self.reason + (f" ({facts})" if facts else ""))

    def __str__(self) -> str:
        return f"{self.message}; {self.hint} (kvreg explain {self.reason})"


class KVRegError(Exception):
    """Everything kvreg raises on purpose. `retryable` says whether trying again can help."""

    retryable = False


class EngineUnsupported(KVRegError):
    """The engine does not describe its KV caches in a form kvreg reads; `needs` says what would."""

    def __init__(self, engine: str, version: str, needs: str) -> None:
        super().__init__(engine, version, needs)
        self.engine = engine
        self.version = version
        self.needs = needs

    def __str__(self) -> str:
        return _one_line(f"kvreg cannot read {self.engine} {self.version}: it needs {self.needs}")


class RegistrationRejected(KVRegError, ValueError):
    """A stage refused what was offered; `rejections` holds all that it refused, never just the first."""

    def __init__(self, rejections: tuple[Rejection, ...]) -> None:
        super().__init__(rejections)
        self.rejections = rejections

    def __str__(self) -> str:
        return "kvreg refused this registration: " + " | ".join(map(str, self.rejections))


class TransferError(KVRegError):
    """The backend could not register the plan; `reason`, `facts` and, as `__cause__`, the backend's own error say why."""

    def __init__(self, reason: Reason, facts: Facts) -> None:
        super().__init__(reason, facts)
        self.reason = reason
        self.facts = facts

    @property
    def rejection(self) -> Rejection:
        """The same, in the form the observers and the command line show."""
        return Rejection(Stage.TRANSFER_REGISTER, self.reason, facts=self.facts)

    def __str__(self) -> str:
        return f"kvreg could not register: {self.rejection}"


class TransferUnavailable(TransferError):
    """Not reachable, or no answer in time: trying again can help."""

    retryable = True


class TransferRefused(TransferError):
    """The backend said no: trying again cannot help."""


class SnapshotInvalid(KVRegError, ValueError):
    """A file cannot be read as a snapshot; `json_path` says where in it (`$.kv_caches['l.0'].stride[1]`), `problem` why."""

    def __init__(self, path: str, json_path: str, problem: str) -> None:
        super().__init__(path, json_path, problem)
        self.path = path
        self.json_path = json_path
        self.problem = problem

    def __str__(self) -> str:
        return _one_line(f"{self.path}: {self.json_path}: {self.problem}")


class PreflightImpossible(KVRegError):
    """No plan for this model and these flags: `problem` says why, in the engine's words where it has some; `change` what to set."""

    def __init__(self, problem: str, change: str) -> None:
        super().__init__(problem, change)
        self.problem = problem
        self.change = change

    def __str__(self) -> str:
        return _one_line(self.problem + (f" (change {self.change})" if self.change else ""))


class RuleRejected(KVRegError):
    """A rule or check refuses one layer, with facts; the stage adds layer, group and rule."""

    def __init__(self, reason: Reason, facts: Facts) -> None:
        super().__init__(reason, facts)
        self.reason = reason
        self.facts = facts

    def __str__(self) -> str:
        return _one_line(f"{self.reason} ({' '.join(f'{name}={_fact(value)}' for name, value in self.facts.items())})")


def reject(reason: Reason, **facts: Fact) -> RuleRejected:
    """The refusal of one layer, to be raised: `raise reject(Reason.WIDTH, content_bytes=…)`."""
    return RuleRejected(reason, facts)


class _Facts(dict[str, Fact]):
    """Facts for a hint; a fact the raiser did not give stays visible as its name instead of hiding the refusal."""

    def __missing__(self, name: str) -> str:
        return f"<{name}>"


def _fact(value: Fact) -> str:
    return ",".join(map(_fact, value)) if isinstance(value, tuple) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
