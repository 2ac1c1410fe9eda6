"""A registration replayed without a backend: the three pure stages, and their verdict as the document of `kvreg check --json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected, Rejection
from stages.model import EditedLayer, EngineGroup, ExcludedLayer, Offer, Plan
from stages.rules import RULES, Rule
from stages.validate import validate


@dataclass(frozen=True, slots=True)
class Accepted:
    """The plan a worker would register."""

    offer: Offer
    plan: Plan


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a worker would not come up."""

    offer: Offer
    rejections: tuple[Rejection, ...]


def check(offer: Offer, rules: tuple[Rule, ...] = RULES) -> Accepted | Rejected:
    """The verdict on an offer; nothing is registered, and no tensor's bytes are read."""
    try:
        return Accepted(offer, engine_groups(edit(validate(offer), rules)))
    except RegistrationRejected as refusal:
        return Rejected(offer, refusal.rejections)


def document(snapshot: str, verdict: Accepted | Rejected) -> dict[str, Any]:
    """A verdict as one JSON document; layers in registration order, groups in the order of their first layer."""
    layers: list[dict[str, Any]] = []
    groups: Sequence[EngineGroup] = ()
    if isinstance(verdict, Accepted):
        answers = {layer.layer.name: _registered(layer) for layer in verdict.plan.layers}
        answers |= {layer.name: _excluded(layer) for layer in verdict.plan.excluded}
        in_order = dict.fromkeys((*verdict.offer.caches, *answers))
        layers, groups = [answers[name] for name in in_order], verdict.plan.groups
    return {
        "snapshot": snapshot,
        "outcome": "accepted" if isinstance(verdict, Accepted) else "rejected",
        "layers": layers,
        "groups": [_group(group) for group in groups],
        "rejections": [] if isinstance(verdict, Accepted) else [_rejection(rejection) for rejection in verdict.rejections],
    }


def _registered(edited: EditedLayer) -> dict[str, Any]:
    view = edited.view
    return {
        "name": edited.layer.name,
        "group": edited.layer.group,
        "disposition": "registered",
        "exclusion": None,
        "rule": edited.rule,
        "view": {
            "dtype": str(view.dtype).removeprefix("torch."),
            "shape": list(view.shape),
            "stride": list(view.stride()),
            "storage_offset": view.storage_offset(),
            "block_dim": edited.block_dim,
        },
    }


def _excluded(layer: ExcludedLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "group": layer.group,
        "disposition": "excluded",
        "exclusion": layer.exclusion,
        "rule": None,
        "view": None,
    }


def _group(group: EngineGroup) -> dict[str, Any]:
    return {
        "engine_group_id": group.engine_group_id,
        "layer_names": list(group.layer_names),
        "tokens_per_block": group.tokens_per_block,
        "slots_per_block": group.slots_per_block,
        "block_bytes": group.block_bytes,
        "block_stride_bytes": group.block_stride_bytes,
        "sw_size_tokens": group.sw_size_tokens,
        "recurrent_state": group.recurrent_state,
        "opaque": group.opaque,
    }


def _rejection(rejection: Rejection) -> dict[str, Any]:
    return {
        "stage": rejection.stage,
        "reason": rejection.reason,
        "rule": rejection.rule,
        "group": rejection.group,
        "layer_names": list(rejection.layer_names),
        "facts": dict(rejection.facts),
        "message": rejection.message,
        "hint": rejection.hint,
    }
