"""What a worker hands over, as an offer: order, memory, names, and where each fact is taken from."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.engine.observe import leaf_spec, observe
from stages.model import Worker
from tests.compat.specs import build, spec_classes

pytestmark = pytest.mark.engine


def _config(planning: ModuleType, *groups: Any, num_blocks: int = 4, **more: Any) -> Any:
    return planning.interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=list(groups), **more)


def _attention(planning: ModuleType, *names: str, **changes: Any) -> Any:
    return planning.interface.KVCacheGroupSpec(list(names), build(spec_classes(planning.interface)["FullAttentionSpec"], **changes))


def test_caches_keep_the_engines_order(planning: ModuleType) -> None:
    """Layers are registered in the engine's order, which need not be that of the groups."""
    caches = {name: torch.zeros(4, 2, 96, 64) for name in ("z", "a", "m")}
    offer = observe(_config(planning, _attention(planning, "a"), _attention(planning, "m", "z")), caches)
    assert list(offer.caches) == ["z", "a", "m"]
    assert [group.layer_names for group in offer.groups] == [("a",), ("m", "z")]
    assert all(offer.caches[name].tensors[0].tensor is caches[name] for name in caches)


def test_a_list_of_states_stays_a_list(planning: ModuleType) -> None:
    """A recurrent layer of an older engine hands over conv and ssm state, and both are kept as one page's parts."""
    offer = observe(_config(planning), {"m": [torch.zeros(4, 8), torch.zeros(4, 3)], "a": torch.zeros(4)})
    assert [(cache.listed, len(cache.tensors)) for cache in offer.caches.values()] == [(True, 2), (False, 1)]


def test_the_same_memory_has_the_same_name(planning: ModuleType) -> None:
    """Two layers cut from one allocation share a storage, whatever their views; two allocations never do."""
    memory = torch.zeros(100)
    again = torch.empty(0).set_(memory.untyped_storage())
    caches = {"a": memory[:10], "b": memory[10:].view(torch.int8), "c": again, "d": torch.zeros(100)}
    offer = observe(_config(planning), caches)
    named = [offer.caches[name].tensors[0] for name in caches]
    assert len({part.storage for part in named[:3]}) == 1
    assert named[3].storage != named[0].storage
    assert {part.storage_size_bytes for part in named} == {400}


def test_memory_without_an_address_is_told_apart_too(planning: ModuleType) -> None:
    """A registration replayed on meta tensors keeps which layers share memory."""
    one, other = torch.empty(8, device="meta"), torch.empty(8, device="meta")
    offer = observe(_config(planning), {"a": one, "b": one[4:], "c": other})
    a, b, c = (offer.caches[name].tensors[0] for name in "abc")
    assert a.storage == b.storage != c.storage
    assert (a.storage_size_bytes, c.storage_size_bytes) == (32, 32)


def test_facts_come_from_the_engines_config(planning: ModuleType) -> None:
    """In a worker nothing needs to be said twice: rank, ranks per sequence, model and layout are the engine's."""
    engine = planning.vllm_config("BLNHC", 4)
    engine.parallel_config.rank, engine.parallel_config.world_size = 3, 8
    engine.parallel_config.decode_context_parallel_size = 2
    offer = observe(_config(planning), {}, vllm_config=engine)
    assert (offer.worker, offer.dcp_size, offer.model_name, offer.layout) == (Worker(3, 8), 2, "planned", "BLNHC")
    assert offer.engine.name == "vllm"
    assert offer.engine.version


def test_no_two_workers_of_a_deployment_have_one_id(planning: ModuleType) -> None:
    """Replicas of a dense model all count ranks from 0; the id goes on over them. The model's name is the served one."""
    engine = planning.vllm_config("BLNHC", 4)
    engine.model_config.served_model_name = ["alias", "other"]
    engine.parallel_config.rank, engine.parallel_config.world_size = 1, 2
    engine.parallel_config.data_parallel_index, engine.parallel_config.data_parallel_size = 3, 4
    offer = observe(_config(planning), {}, vllm_config=engine)
    assert (offer.worker, offer.model_name) == (Worker(7, 8), "alias")


def test_what_the_caller_says_wins(planning: ModuleType) -> None:
    """A caller who knows better says so, and is not overruled by the engine's config."""
    engine = planning.vllm_config("BLNHC", 4)
    given = observe(
        _config(planning, kv_cache_layout="LBNHC"),
        {},
        layout="HND",
        vllm_config=engine,
        dcp_size=4,
        model_name="mine",
        worker=Worker(1, 2),
        chunk_size_tokens=544,
    )
    assert (given.worker, given.dcp_size, given.model_name, given.layout) == (Worker(1, 2), 4, "mine", "HND")
    assert given.chunk_size_tokens == 544


def test_the_groups_config_names_the_layout_before_the_engines(planning: ModuleType) -> None:
    """The layout that came with the groups is the one their tensors were allocated by."""
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout="LBNHC"),
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_rank=0, data_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(model="m", served_model_name="m"),
    )
    assert observe(_config(planning, kv_cache_layout="BLHNC"), {}, vllm_config=engine).layout == "BLHNC"
    assert observe(_config(planning), {}, vllm_config=engine).layout == "LBNHC"
    assert observe(_config(planning), {}).layout is None


def test_a_rank_without_a_groups_layers_keeps_the_group(planning: ModuleType) -> None:
    """Under pipeline parallelism group ids stay the engine's: a group without layers here is empty, not gone."""
    wide, narrow = (build(spec_classes(planning.interface)["FullAttentionSpec"], head_size=size) for size in (32, 64))
    wrapper = planning.interface.UniformTypeKVCacheSpecs(block_size=96, kv_cache_specs={"a": wide, "b": narrow})
    elsewhere, here = planning.interface.KVCacheGroupSpec([], wrapper), planning.interface.KVCacheGroupSpec(["b"], wrapper)
    offer = observe(_config(planning, elsewhere, here), {})
    assert [(group.layer_names, tuple(group.specs)) for group in offer.groups] == [((), ()), (("b",), ("b",))]
    assert offer.groups[1].specs["b"].page_size_bytes == 2 * offer.groups[1].block_size * 2 * 64 * 2


def test_quantization_is_described_by_name(planning: ModuleType) -> None:
    """A snapshot says fp8 where the dtype only says uint8."""
    mode = planning.interface.KVQuantMode.FP8_PER_TENSOR
    leaf = leaf_spec(build(spec_classes(planning.interface)["FullAttentionSpec"], dtype=torch.uint8, kv_quant_mode=mode))
    assert (leaf.described["dtype"], leaf.described["kv_quant_mode"]) == ("uint8", "fp8_per_tensor")
