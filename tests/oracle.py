#!/usr/bin/env python3
"""Judge `kvreg check --json` by bytes, independently of kvreg.

usage: oracle.py CASES_DIR [--command 'kvreg check --json'] [--list]

For each snapshot NAME.json in CASES_DIR (its NAME.expect.json says accepted or rejected, and whom):
accepted: every layer of a transferable group is registered, and for sampled block ids the bytes its view addresses are
exactly the bytes the block owns in the raw tensor, or reach only into the block's own padding; slots and tokens per
block, grouping and exclusions are right. rejected: exit status 1, and every expected layer is named.
Pure standard library: it knows nothing of torch, vLLM, LMCache or kvreg's rules, and imports nothing of kvreg.
"""

import argparse
import itertools
import json
import math
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Interval: TypeAlias = tuple[int, int]

ITEM = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
}
MAX_RUNS = 2_000_000


def runs(shape: list[int], stride: list[int], offset: int, item: int) -> list[Interval]:
    """Byte intervals [lo, hi) an indexed view touches, merged, sorted. Sizes are small by construction of the cases."""
    if 0 in shape:
        return []
    dims = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
    run = item
    while dims and dims[-1][0] * item == run:
        run *= dims.pop()[1]
    if math.prod(n for _, n in dims) > MAX_RUNS:
        raise SystemExit("a case is too large for the oracle")
    out = []
    for index in itertools.product(*(range(n) for _, n in dims)):
        lo = (offset + sum(i * s for i, (s, _) in zip(index, dims, strict=True))) * item
        out.append((lo, lo + run))
    return merge(out)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same bytes, sorted, no two intervals touching."""
    out: list[list[int]] = []
    for lo, hi in sorted(intervals):
        if out and lo <= out[-1][1]:
            out[-1][1] = max(out[-1][1], hi)
        else:
            out.append([lo, hi])
    return [(lo, hi) for lo, hi in out]


def minus(intervals: Iterable[Interval], others: list[Interval]) -> list[Interval]:
    """The bytes of `intervals` that are in none of `others`, which are sorted."""
    out = []
    for start, hi in intervals:
        lo = start
        for lo2, hi2 in others:
            if hi2 <= lo or lo2 >= hi:
                continue
            if lo2 > lo:
                out.append((lo, lo2))
            lo = max(lo, hi2)
            if lo >= hi:
                break
        if lo < hi:
            out.append((lo, hi))
    return out


def size(intervals: Iterable[Interval]) -> int:
    """How many bytes."""
    return sum(hi - lo for lo, hi in intervals)


def rows(tensor: Json, dim: int, first: int, count: int) -> list[Interval]:
    """The bytes of `count` rows along `dim`."""
    shape = list(tensor["shape"])
    shape[dim] = count
    return runs(shape, tensor["stride"], tensor["storage_offset"] + first * tensor["stride"][dim], ITEM[tensor["dtype"]])


def block_dim(tensor: Json, spec: Json, num_blocks: int) -> int:
    """K/V-first rank-5 attention tensors have the block dim second; everything else has it first."""
    shape = tensor["shape"]
    kv_first = len(shape) == 5 and shape[0] == 2 and spec["kind"] != "mamba" and shape[1] % num_blocks == 0
    return int(kv_first and not (shape[1] == 2 and shape[0] == num_blocks))


def owned(cache: Any, spec: Json, num_blocks: int, block: int) -> list[Interval]:
    """The bytes a block owns in its layer's raw tensors."""
    out = []
    for tensor in cache if isinstance(cache, list) else [cache]:
        dim = block_dim(tensor, spec, num_blocks)
        pages, rest = divmod(tensor["shape"][dim], num_blocks)
        if rest:
            raise SystemExit("a case is wrong: pages do not divide by blocks")
        out += rows(tensor, dim, block * pages, pages)
    return merge(out)


def judge(snapshot: Json, expect: Json, answer: Json, status: int) -> Iterator[str]:
    """Yield one complaint a line."""
    if expect["outcome"] == "rejected":
        yield from judge_rejected(expect, answer, status)
    elif answer.get("outcome") != "accepted" or status != 0:
        messages = [rejection.get("message") for rejection in answer.get("rejections", [])][:2]
        yield f"must be accepted, got {answer.get('outcome')} with exit {status}: {messages}"
    else:
        yield from judge_accepted(snapshot, answer)


def judge_rejected(expect: Json, answer: Json, status: int) -> Iterator[str]:
    """A refusal names whom it must, and says stage, reason, message and hint."""
    if answer.get("outcome") != "rejected" or status != 1:
        yield f"must be rejected, got {answer.get('outcome')} with exit {status}"
    named = {name for rejection in answer.get("rejections", []) for name in rejection.get("layer_names", [])}
    missing = [name for name in expect.get("layer_names", []) if name not in named]
    if missing:
        yield f"rejected without naming {missing[:3]}"
    for rejection in answer.get("rejections", []):
        if not all(rejection.get(key) for key in ("stage", "reason", "message", "hint")):
            yield "a rejection lacks stage, reason, message or hint"


def judge_accepted(snapshot: Json, answer: Json) -> Iterator[str]:
    """Every layer is registered or rightly left out, and every group is what its layers are."""
    layers = {layer["name"]: layer for layer in answer["layers"]}
    group_of = {name: out for out in answer["groups"] for name in out["layer_names"]}
    seen = set()
    for gid, group in enumerate(snapshot["groups"]):
        specs = group.get("specs") or dict.fromkeys(group["layer_names"], group.get("spec"))
        scratch = all(spec.get("prefix_cacheable") is False for spec in specs.values())
        excluded = "not_transferable" if group.get("transferable") is False else "scratch" if scratch else None
        for name in group["layer_names"]:
            seen.add(name)
            layer, out = layers.get(name), group_of.get(name)
            if layer is None:
                yield f"{name}: not in the answer"
            elif excluded:
                if layer["disposition"] != "excluded" or layer["exclusion"] != excluded:
                    yield f"{name}: must be excluded as {excluded}, got {layer['disposition']} {layer['exclusion']}"
                if out is not None:
                    yield f"{name}: excluded, yet in a group"
            elif layer["disposition"] != "registered" or out is None:
                yield f"{name}: must be registered"
            else:
                if out["engine_group_id"] != gid:
                    yield f"{name}: engine group {out['engine_group_id']}, must be {gid}"
                yield from judge_layer(snapshot, group, specs[name], name, layer["view"], out)
    for name in snapshot["kv_caches"]:
        layer = layers.get(name)
        if name not in seen and (layer is None or layer["disposition"] != "excluded" or layer["exclusion"] != "shared"):
            yield f"{name}: shares an owner's cache, must be excluded as shared"
    order = list(snapshot["kv_caches"])
    firsts = [min(order.index(name) for name in group["layer_names"]) for group in answer["groups"] if group["layer_names"]]
    if firsts != sorted(firsts):
        yield "groups are not in the order of their first layer"
    for group in answer["groups"]:
        views = [layers[name]["view"] for name in group["layer_names"]]
        shapes = {(tuple(view["shape"]), tuple(view["stride"]), view["dtype"]) for view in views}
        if len(shapes) > 1:
            yield f"group of {group['layer_names'][0]}: mixes {len(shapes)} geometries"


def judge_layer(snapshot: Json, group: Json, spec: Json, name: str, view: Json, out: Json) -> Iterator[str]:
    """One registered layer: the bytes of sampled blocks, then what its group says of it."""
    num_blocks, cache = group["num_blocks"], snapshot["kv_caches"][name]
    if num_blocks == 0:
        return
    if view["shape"][view["block_dim"]] != num_blocks:
        yield f"{name}: view has {view['shape'][view['block_dim']]} blocks, must have {num_blocks}"
        return
    first = cache[0] if isinstance(cache, list) else cache
    storage_bytes = snapshot["storages"][first["storage"]]["nbytes"]
    for block in sorted({0, 1, num_blocks // 2, num_blocks - 1} & set(range(num_blocks))):
        complaint = judge_block(cache, spec, view, num_blocks, block, storage_bytes)
        if complaint:
            yield f"{name}: block {block}: {complaint}"
            break
    scale = 1 if spec["kind"] == "mamba" or spec.get("dcp_sharded") is False else snapshot.get("dcp_size", 1)
    tokens = spec["block_size"] * scale
    if out["tokens_per_block"] != tokens:
        yield f"{name}: tokens_per_block {out['tokens_per_block']}, must be {tokens}"
    slots = out["slots_per_block"]
    if spec["kind"] != "mamba":
        right = spec["num_states"] if Fraction(spec["block_size"], spec["num_states"]) >= 1 else spec["block_size"]
        if slots != right:
            yield f"{name}: slots_per_block {slots}, must be {right}"
    else:
        own = owned(cache, spec, num_blocks, 0)
        step = spec["block_size"] * ITEM[view["dtype"]]
        fits = -(-(own[-1][1] - own[0][0]) // step) * step <= spec["page_size_bytes"]
        if (slots != spec["block_size"]) if fits else (slots < 1 or spec["block_size"] % slots):
            yield f"{name}: slots_per_block {slots}, must be {spec['block_size']}{'' if fits else ' or a divisor'}"
    if bool(out["recurrent_state"]) != (spec["kind"] == "mamba"):
        yield f"{name}: recurrent_state {out['recurrent_state']}"
    windowed = spec["kind"].startswith("sliding_window")
    window = spec["block_size"] if spec["kind"] == "mamba" else spec.get("sliding_window", -1) if windowed else -1
    if out["sw_size_tokens"] != window:
        yield f"{name}: sw_size_tokens {out['sw_size_tokens']}, must be {window}"
    if out["block_stride_bytes"] != view["stride"][view["block_dim"]] * ITEM[view["dtype"]]:
        yield f"{name}: block_stride_bytes is not the view's"


def judge_block(cache: Any, spec: Json, view: Json, num_blocks: int, block: int, storage_bytes: int) -> str | None:
    """What is wrong with the bytes a view addresses for one block, against those the block owns."""
    own = owned(cache, spec, num_blocks, block)
    plan = rows(view, view["block_dim"], block, 1)
    missing = minus(own, plan)
    if missing:
        return f"{size(missing)} of {size(own)} owned bytes are not covered"
    extra = minus(plan, own)
    beyond = minus(extra, [(own[0][0], own[0][0] + spec["page_size_bytes"])])
    if beyond:
        return f"{size(beyond)} bytes belong to somebody else"
    others = [run for other in (block - 1, block + 1) if 0 <= other < num_blocks for run in owned(cache, spec, num_blocks, other)]
    if size(extra) != size(minus(extra, merge(others))):
        return "reaches into a neighbour block"
    if plan[-1][1] > storage_bytes:
        return "runs past the storage"
    return None


def snapshots(cases: pathlib.Path) -> list[pathlib.Path]:
    """The cases in a directory."""
    return sorted(file for file in cases.rglob("*.json") if not file.name.endswith(".expect.json"))


def complaints(file: pathlib.Path, answer: Json | None) -> list[str]:
    """What is wrong with the answer to one case."""
    if answer is None:
        return ["no answer"]
    expect = json.loads(file.with_suffix(".expect.json").read_text())
    status = {"accepted": 0, "rejected": 1}.get(answer.get("outcome", ""), 2)
    try:
        return list(judge(json.loads(file.read_text()), expect, answer, status))
    except (KeyError, TypeError, IndexError) as exc:
        return [f"the answer does not keep the contract: {exc!r}"]


def main() -> int:
    """Ask once about all cases, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=pathlib.Path)
    parser.add_argument("--command", default="kvreg check --json")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    files = snapshots(asked.cases)
    done = subprocess.run(shlex.split(asked.command) + [str(file) for file in files], capture_output=True, text=True, check=False)
    answers = {}
    for line in done.stdout.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            print(f"not JSON: {line[:100]}")
            continue
        answers[pathlib.Path(answer["snapshot"]).name] = answer
    right = 0
    for file in files:
        wrong = complaints(file, answers.get(file.name))
        right += not wrong
        for complaint in wrong[:4]:
            print(f"{file.stem}: {complaint}")
        if asked.list and not wrong:
            print(f"{file.stem}: right")
    if done.returncode not in (0, 1):
        print(f"exit status {done.returncode}: {done.stderr.strip()[-300:]}")
    print(f"{right}/{len(files)} right")
    return 0 if right == len(files) and files else 1


if __name__ == "__main__":
    sys.exit(main())
