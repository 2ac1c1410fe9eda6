"""What a reason for a refusal means and what to do about it: `kvreg explain REASON`, and the runbooks' page of reasons.

The way out itself is `stages.errors.HINTS`; this adds what the reason means, who has to act, and the commands to run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from stages.errors import Reason, Rejection, Stage


class Actor(Enum):
    """Who ends a refusal, and what is done meanwhile."""

    OPERATOR = "Change what the way out names, and start the engine again: it is refused again until then."
    REPORT = "No setting ends it. Report the snapshot (names, shapes and strides, no contents of any tensor)."
    DEVELOPER = "The memory layout is new to kvreg: a rule has to be added or fixed. CONTRIBUTING.md shows how, from the snapshot."
    SERVER = "Look at LMCache's server: whether it runs, what its address is, and what its log says at the time of the failure."


LOOK = (
    "kubectl logs POD --previous | grep kvreg    # or: journalctl -u UNIT | grep kvreg; the line names group, layers and facts",
    "kubectl describe pod POD                    # the same line as the container's last message",
    "kvreg check SNAPSHOT                        # replays it on any machine; kvreg.snapshot_dir keeps one of every refusal",
)
"""Where to find which layers were refused, with what facts."""

MEANWHILE = (
    'Meanwhile, if the engine must serve without reuse: "kvreg.on_refusal": "bypass" in kv_connector_extra_config, or no KV connector. '
    "Nothing wrong was stored."
)


@dataclass(frozen=True, slots=True)
class Meaning:
    """One reason: what it says, in a sentence, and who acts."""

    says: str
    actor: Actor


_OPERATOR, _REPORT, _DEVELOPER, _SERVER = Actor.OPERATOR, Actor.REPORT, Actor.DEVELOPER, Actor.SERVER

MEANINGS: Mapping[Reason, Meaning] = {
    Reason.CROSS_ATTENTION: Meaning("The model keeps encoder-decoder caches, which depend on more than the tokens before them.", _OPERATOR),
    Reason.ENCODER_ONLY_ATTENTION: Meaning(
        "A layer attends within one request only, and keeps nothing a second request could use.", _OPERATOR
    ),
    Reason.MAMBA_CACHE_MODE: Meaning(
        "Recurrent layers keep only their running state, none at the block boundaries that reuse needs.", _OPERATOR
    ),
    Reason.UNKNOWN_KIND: Meaning("The engine names a kind of cache that this release of kvreg does not know.", _DEVELOPER),
    Reason.HOST_RESIDENT: Meaning("The group's blocks lie in host memory, and the transfer reads device memory.", _OPERATOR),
    Reason.LAYER_IN_TWO_GROUPS: Meaning("The engine put one layer into two groups, so its block ids would mean two things.", _REPORT),
    Reason.LAYER_WITHOUT_CACHE: Meaning("A group names a layer for which the engine registered no tensor.", _REPORT),
    Reason.LAYER_WITHOUT_SPEC: Meaning("A group names a layer without saying what it keeps per block.", _REPORT),
    Reason.CACHE_WITHOUT_GROUP: Meaning("The engine registered a tensor that no group names and that is no other layer's memory.", _REPORT),
    Reason.AUX_POOL_NAME: Meaning("A page pool of another connector is not named, or not shaped, as LMCache reads it.", _DEVELOPER),
    Reason.CHUNK_SIZE: Meaning(
        "A chunk of LMCache would end inside a block, because the chunk is no multiple of every group's tokens.", _OPERATOR
    ),
    Reason.UNKNOWN_LAYOUT: Meaning("The engine names a memory layout that this release of kvreg does not know.", _OPERATOR),
    Reason.SCATTERED_LAYOUT: Meaning("In this layout a layer's block lies in many pieces, and a transfer copies one.", _OPERATOR),
    Reason.BLOCK_DIM_AMBIGUOUS: Meaning(
        "There are two blocks and a dimension of size two that may be K and V: neither can be ruled out.", _OPERATOR
    ),
    Reason.PAGES_PER_BLOCK: Meaning("The tensor's pages cannot be dealt out evenly over the group's blocks.", _REPORT),
    Reason.PAGE_TOO_SMALL: Meaning("The engine says that a block has more bytes than its tensor holds.", _REPORT),
    Reason.PAGE_TOO_LARGE: Meaning("The tensor holds more bytes a block than the engine says a block has.", _REPORT),
    Reason.PAST_STORAGE: Meaning("The last block ends behind the memory it is cut from.", _REPORT),
    Reason.STATE_STRIDES: Meaning("The states of one recurrent layer step through memory by different strides.", _REPORT),
    Reason.STATES_APART: Meaning("The states of one recurrent layer do not lie side by side in one page.", _REPORT),
    Reason.PADDED_KERNEL_PAGES: Meaning(
        "A block is several kernel pages with padding between them, so it is not one run of bytes.", _OPERATOR
    ),
    Reason.SCATTERED_BLOCK: Meaning("A block of this layer lies in more pieces than a transfer copies.", _OPERATOR),
    Reason.WIDTH: Meaning("A block's bytes cannot be spread evenly over its slots within its own page.", _OPERATOR),
    Reason.NOT_A_VIEW: Meaning("A rule returned a copy: what LMCache wrote there would never reach the engine.", _DEVELOPER),
    Reason.UNREADABLE_VIEW: Meaning("LMCache's kernels cannot address a view of this rank and order.", _DEVELOPER),
    Reason.BLOCK_COUNT: Meaning("The transfer would count other blocks than the scheduler, so block ids would miss.", _DEVELOPER),
    Reason.BLOCK_STRIDE: Meaning("From the second block on the transfer would read at the wrong address.", _DEVELOPER),
    Reason.SLOTS_PER_BLOCK: Meaning(
        "The transfer would take the group for a compressed one, or for a finer one, and copy part of a block.", _DEVELOPER
    ),
    Reason.BYTES_MISSED: Meaning("A reuse would restore blocks with holes.", _DEVELOPER),
    Reason.BYTES_OF_ANOTHER_BLOCK: Meaning("A reuse would overwrite tokens of another request.", _DEVELOPER),
    Reason.BYTES_BEYOND_PADDING: Meaning("A reuse would write behind the block, where other memory may lie.", _DEVELOPER),
    Reason.BYTES_OF_ANOTHER_LAYER: Meaning("A reuse would overwrite another layer's part of the same block.", _DEVELOPER),
    Reason.TRANSFER_IDENTITY_SHARED: Meaning(
        "LMCache would treat two layers as one kind and use the first one's stride for both.", _DEVELOPER
    ),
    Reason.ALREADY_REGISTERED: Meaning("This worker registered before and has not unregistered.", _REPORT),
    Reason.NOTHING_TO_REGISTER: Meaning("Every layer of this worker is excluded, so there is nothing to transfer.", _OPERATOR),
    Reason.TRANSFER_TIMEOUT: Meaning("The server was given the plan, and no answer came in time.", _SERVER),
    Reason.TRANSFER_UNREACHABLE: Meaning("The server could not be reached.", _SERVER),
    Reason.TRANSFER_REFUSED: Meaning("The server was given the plan and said no.", _SERVER),
    Reason.SERVER_DISAGREES: Meaning(
        "The installed LMCache groups or reads the views in another way than they were proven for.", _OPERATOR
    ),
    Reason.TRANSFER_MODE: Meaning(
        "Worker and server are set to different ways of moving bytes, or to one that kvreg has not proven.", _OPERATOR
    ),
    Reason.SHARED_MEMORY: Meaning(
        "The caches could not be moved into shared memory, where a server on the same host reads them.", _OPERATOR
    ),
    Reason.PADDED_PAGES_ON_CPU: Meaning("On CPU the server would copy a padded page as if it had no padding.", _OPERATOR),
    Reason.PREFIX_UNREAD: Meaning("A prefix would be loaded rightly, and the engine would compute as if it were not there.", _OPERATOR),
    Reason.SHUTTING_DOWN: Meaning("The engine was stopped while it registered.", _OPERATOR),
}


def way_out(reason: Reason) -> str:
    """The hint of a reason; facts that only a refusal has stand as <names>."""
    return Rejection(Stage.VALIDATE, reason).hint


def explain(reason: Reason) -> str:
    """What a reason means, its way out, who acts, and the commands that show more: text for a terminal, one idea a line."""
    meaning = MEANINGS[reason]
    lines = [reason.value, "", meaning.says, "", f"Way out: {way_out(reason)}", "", meaning.actor.value]
    if reason is not Reason.SHUTTING_DOWN:
        lines += ["", MEANWHILE, "", "To see more:", *(f"  {command}" for command in LOOK)]
    return "\n".join(lines)
