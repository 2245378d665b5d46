import pytest

from jorca.config import ConfigError
from jorca.planning import GPUS, gpu, topology
from jorca.planning.topology import make_devices

# Multiply-adds of a multiprocessor per clock in bfloat16 with float32 sums, times two (NVIDIA's architecture
# white papers), and its shared memory in KiB (CUDA programming guide, technical specifications).
FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 6): 512, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}
SHARED_KIB = {(8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228, (10, 0): 228}
# Of the names under which they are sold, in GB; B200's as sold in HGX boards.
SOLD_GB = {"a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "l4": 24, "a10g": 24, "b200": 180}


@pytest.mark.parametrize("name", GPUS)
def test_peak_rate_is_that_of_all_multiprocessors_at_nearly_their_highest_clock(name):
    facts = GPUS[name]
    peak = facts.num_processors * FLOPS_PER_CLOCK[facts.compute_capability] * facts.clock_ghz * 1e9
    assert 0.9 * peak <= facts.flops_per_s <= 1.01 * peak


@pytest.mark.parametrize("name", GPUS)
def test_a_block_can_have_all_shared_memory_but_one_kibibyte(name):
    facts = GPUS[name]
    assert facts.shared_bytes_per_processor == SHARED_KIB[facts.compute_capability] * 1024
    assert facts.shared_bytes_per_block == facts.shared_bytes_per_processor - 1024


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_what_is_sold_give_or_take_a_tenth(name):
    assert 0.9 <= GPUS[name].memory_bytes / (SOLD_GB[name] * 1e9) <= 1.1


def test_an_unknown_gpu_is_refused_with_all_names():
    with pytest.raises(ConfigError, match=r"gpu must be one of a100-40gb, a100-80gb, h100, .*, got 'tpu'"):
        gpu("tpu")


def test_without_the_compiler_parts_the_error_names_the_extra(monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin for cuda")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", missing)
    message = r"compiling for h200 needs .* pip install 'jorca\[aot\]' \(no plugin for cuda\)"
    with pytest.raises(ConfigError, match=message):
        make_devices("h200")
