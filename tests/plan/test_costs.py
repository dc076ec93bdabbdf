"""Time primitives, against what can be worked out by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cubeloom.plan.costs import (
    Algorithm,
    Quantity,
    all_gather,
    all_reduce,
    all_to_all,
    exposed,
    matmul,
    memory_bound,
    reduce_scatter,
    ring_bandwidth,
    send,
    together,
)
from cubeloom.plan.hardware import Cluster, Tier, cluster, device
from flows import Flow, completions, fair_rates

# Two numbers of the table are round enough to work with by hand: 8 devices a node, 100 GB/s inside, 4 NICs of 10 GB/s.
PLAIN = replace(
    cluster("dgx-a100"),
    link_bandwidth=100e9,
    pair_bandwidth=100e9,
    link_latency=1e-6,
    nics=4,
    nic_bandwidth=10e9,
    nic_latency=10e-6,
    start=5e-6,
    eager_fraction=0.0,
)
GPU = replace(
    device("a100-80"),
    bf16=100e12,
    matmul_fraction=0.5,
    processors=100,
    tile_rows=128,
    tile_columns=128,
    bandwidth=1e12,
    bandwidth_fraction=1.0,
    launch=0.0,
    host=10e-6,
)
DATA = Path(__file__).parents[2].parent / "shared" / "data"

ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree")

approx = pytest.approx


# --- collectives ---


@pytest.mark.parametrize("group", [2, 4, 8])
def test_a_ring_inside_a_node(group: int) -> None:
    n, share = 1e8, (group - 1) / group
    assert all_gather(PLAIN, n, group) == approx(5e-6 + (group - 1) * 1e-6 + share * n / 100e9)
    assert reduce_scatter(PLAIN, n, group) == all_gather(PLAIN, n, group)
    assert all_reduce(PLAIN, n, group, algorithm="ring") == approx(
        5e-6 + 2 * (group - 1) * 1e-6 + 2 * share * n / 100e9
    )


def test_a_ring_over_two_nodes_has_one_slow_hop_and_all_nics() -> None:
    assert all_gather(PLAIN, 1e8, 16) == approx(5e-6 + 14e-6 + 10e-6 + 15 / 16 * 1e8 / 40e9)


def test_a_group_of_one_takes_no_time() -> None:
    functions: list[Callable[[Cluster, float, int], Quantity]] = [
        all_gather,
        reduce_scatter,
        all_reduce,
        all_to_all,
        send,
    ]
    assert [float(function(PLAIN, 1e9, 1)) for function in functions] == [0.0] * 5


@pytest.mark.parametrize(
    ("rank_stride", "bandwidths"),
    [(1, {2: 76, 4: 225, 8: 80, 64: 80}), (2, {2: 76, 4: 40, 64: 40}), (4, {2: 20, 64: 20}), (16, {2: 20, 4: 20})],
)
def test_rings_share_nics_as_axonn_measured_on_perlmutter(rank_stride: int, bandwidths: dict[int, int]) -> None:
    """The whole table of AxoNN's code, of which three numbers are in the cluster's file: the rule gives the others."""
    for group, bandwidth in bandwidths.items():
        assert ring_bandwidth(cluster("perlmutter"), group, rank_stride) == approx(bandwidth * 1e9)


def test_a_group_that_does_not_end_with_the_node_leaves_it() -> None:
    assert ring_bandwidth(PLAIN, 8, 1) == 100e9
    assert ring_bandwidth(PLAIN, 3, 1) == 40e9  # the third group of three lies on two nodes


def test_a_tapered_tier_slows_rings_that_cross_it() -> None:
    tapered = replace(PLAIN, outer_tiers=(Tier(32, 20e9, 5e-6),))
    assert ring_bandwidth(tapered, 32, 1) == 40e9
    assert ring_bandwidth(tapered, 64, 1) == 20e9
    assert ring_bandwidth(tapered, 2, 32) == 20e9 / 32


def test_the_socket_of_longhorn_is_narrower_than_its_links() -> None:
    longhorn = cluster("longhorn")
    assert ring_bandwidth(longhorn, 2) == longhorn.pair_bandwidth
    assert ring_bandwidth(longhorn, 4) == longhorn.inner_tiers[0].bandwidth


def test_halving_has_the_bytes_of_a_ring_and_fewer_hops() -> None:
    n = 1e6
    assert all_reduce(PLAIN, n, 64, algorithm="halving") == approx(
        5e-6 + 2 * (3 * 1e-6 + 3 * 10e-6) + 2 * 63 / 64 * n / 40e9
    )


def test_a_tree_goes_along_chains_and_over_the_nodes() -> None:
    n = 1e6
    assert all_reduce(PLAIN, n, 64, algorithm="tree") == approx(5e-6 + 2 * (7 * 1e-6 + 3 * 10e-6) + 2 * n / 40e9)


def test_the_best_is_a_tree_for_small_messages_and_a_ring_for_large() -> None:
    winners: dict[float, Algorithm] = {1e3: "tree", 1e10: "ring"}
    for n, winner in winners.items():
        both = {name: float(all_reduce(PLAIN, n, 16, algorithm=name)) for name in ALGORITHMS}
        assert all_reduce(PLAIN, n, 16) == min(both.values()) == both[winner]


def test_hierarchical_is_a_ring_inside_and_rings_of_shares_between() -> None:
    n = 1e8
    inside = 2 * all_gather(PLAIN, n, 8)
    between = all_reduce(PLAIN, n / 8, 4, 8, "ring")  # eight rings share the NICs
    assert all_reduce(PLAIN, n, 32, algorithm="hierarchical") == approx(inside + between)
    assert all_gather(PLAIN, n, 8, algorithm="hierarchical") == all_gather(PLAIN, n, 8)


def test_the_algorithms_of_an_all_gather() -> None:
    with pytest.raises(ValueError, match="ring, halving and hierarchical"):
        all_gather(PLAIN, 1.0, 2, algorithm="tree")


def test_small_messages_hide_their_hops() -> None:
    """The eager protocol: the longer of latency and bytes at a part of the bandwidth, where that is less than their sum."""
    eager = replace(PLAIN, eager_fraction=0.5)
    latency = 5e-6 + 7e-6
    assert all_gather(eager, 1e5, 8) == approx(latency)
    assert all_gather(eager, 1e9, 8) == all_gather(PLAIN, 1e9, 8)
    sizes = np.logspace(3, 10, 200)
    times = np.asarray(all_gather(eager, sizes, 8))
    assert (np.diff(times) >= 0).all()
    assert (times <= all_gather(PLAIN, sizes, 8)).all()


def test_an_all_to_all_is_held_up_by_what_leaves_the_node() -> None:
    assert all_to_all(PLAIN, 1e8, 8) == approx(5e-6 + 7e-6 + 7 / 8 * 1e8 / 100e9)
    # Eight devices send half of their bytes each out of the node, through 40 GB/s.
    assert all_to_all(PLAIN, 1e8, 16) == approx(5e-6 + 7e-6 + 8 * 10e-6 + 8 * 0.5 * 1e8 / 40e9)


def test_a_message_takes_the_slowest_hop_of_the_chain() -> None:
    assert send(PLAIN, 1e8, 2) == approx(5e-6 + 1e-6 + 1e8 / 100e9)
    assert send(PLAIN, 1e8, 16) == approx(5e-6 + 10e-6 + 1e8 / 10e9)  # one message uses one NIC
    assert send(PLAIN, 1e8, 2, 8) == approx(5e-6 + 10e-6 + 1e8 / 5e9)  # eight devices share four
    assert send(PLAIN, 1e8, 2, 16) == send(PLAIN, 1e8, 2, 8)  # a node has no more


def test_scalars_and_arrays_agree() -> None:
    n, group, rank_stride = np.array([1e5, 1e8, 1e9, 1e6]), np.array([1, 2, 16, 64]), np.array([4, 1, 2, 8])
    functions: list[Callable[..., Quantity]] = [all_gather, reduce_scatter, all_reduce, all_to_all, send]
    for function in functions:
        many = np.asarray(function(PLAIN, n, group, rank_stride))
        assert many.tolist() == [
            float(function(PLAIN, *map(float, row))) for row in zip(n, group, rank_stride, strict=True)
        ]
    assert np.shape(all_reduce(PLAIN, 1e6, group[:, None], rank_stride)) == (4, 4)


@pytest.mark.skipif(not DATA.exists(), reason=f"no measured data at {DATA}")
def test_against_measured_all_reduces() -> None:
    """NCCL on one node of A100, 2 to 8 devices, 1 MB to 1 GB; its file's latency and bandwidth were fitted to this table."""
    with (DATA / "nccl" / "allreduce_a100.csv").open() as file:
        rows = [(int(r["bytes"]), int(r["gpus"]), float(r["out_of_place_ns"]) / 1e9) for r in csv.DictReader(file)]
    size, group, seconds = (np.array(column) for column in zip(*rows, strict=True))
    whole = 8 % group == 0  # others would lie on two nodes, if all devices were in such groups
    off = np.abs(np.asarray(all_reduce(cluster("dgx-a100"), size, group)) / seconds - 1)[whole]
    assert np.median(off) < 0.05
    assert off.max() < 0.4


# --- compute ---


def test_a_matmul_takes_whole_waves() -> None:
    """100 processors, tiles of 128 × 128: 100 tiles are one wave, 101 are two."""
    one = matmul(GPU, 128 * 100, 128, 8192)
    assert one == approx(2 * 128 * 100 * 128 * 8192 / 50e12)
    assert matmul(GPU, 128 * 101, 128, 8192) > 1.2 * one
    assert matmul(GPU, 128 * 200, 128, 8192) == approx(2 * one)


def test_smaller_tiles_fill_the_processors() -> None:
    """50 large tiles would leave half of them idle; as 100 halves they take little more than half a wave."""
    one = matmul(GPU, 128 * 100, 128, 8192)
    assert 0.5 * one < matmul(GPU, 128 * 50, 128, 8192) < 0.6 * one


def test_a_thin_matmul_is_bound_by_memory() -> None:
    m, n, k = 64, 16384, 16384
    assert matmul(replace(GPU, bf16=1000e12), m, n, k) == approx(2 * (m * k + k * n + m * n) / 1e12)


def test_a_batch_of_products_is_one_launch() -> None:
    launched = replace(GPU, launch=5e-6)
    assert matmul(launched, 128, 128, 4096, count=100) == approx(matmul(GPU, 12800, 128, 4096) + 5e-6)


def test_other_operators() -> None:
    assert memory_bound(replace(GPU, launch=5e-6), 1e9) == approx(1e-3 + 5e-6)
    assert matmul(GPU, np.array([128, 256]), 128, 128).shape == (2,)  # type: ignore[union-attr]


# --- overlap ---


def test_communication_takes_its_share_of_computation() -> None:
    assert together(10.0, 4.0, 0.0) == 10.0
    assert together(10.0, 4.0, 0.25) == 11.0  # for 4 s at three quarters of the speed
    assert together(1.0, 4.0, 0.25) == 4.0  # hidden in communication
    assert exposed(10.0, 4.0, 0.25) == 1.0
    assert exposed(np.array([10.0, 1.0]), 4.0).tolist() == [0.0, 3.0]  # type: ignore[union-attr]


# --- flows ---


def test_max_min_fairness_by_the_textbook() -> None:
    """A long flow and a short one on each of two links, of 1 and 2: the long one gets half of the narrow link."""
    assert fair_rates([(0, 1), (0,), (1,)], [1.0, 2.0]).tolist() == [0.5, 0.5, 1.5]


def test_rates_fill_a_link_of_every_flow_and_none_too_much() -> None:
    random = np.random.default_rng(0)
    capacity = random.uniform(1, 10, 12)
    paths = [tuple(random.choice(12, 3, replace=False).tolist()) for _ in range(40)]
    rates = fair_rates(paths, capacity)
    load = np.zeros(12)
    for path, rate in zip(paths, rates, strict=True):
        load[list(path)] += rate
    assert (load <= capacity * (1 + 1e-9)).all()
    for path, rate in zip(paths, rates, strict=True):
        # On some full link of its path no flow is faster: that is what max-min fair means.
        full = [link for link in path if load[link] >= capacity[link] * (1 - 1e-9)]
        assert any(rate >= max(r for p, r in zip(paths, rates, strict=True) if link in p) - 1e-9 for link in full)


def test_a_flow_without_links_takes_no_time() -> None:
    assert fair_rates([()], [1.0]).tolist() == [np.inf]
    assert completions([Flow(5.0, (), 2.0)], [1.0]).tolist() == [2.0]


def test_flows_end_one_after_another() -> None:
    """Both at half of the link; when the short one ends, after 2 s, the long one has it whole."""
    assert completions([Flow(1.0, (0,)), Flow(3.0, (0,))], [1.0]).tolist() == approx([2.0, 4.0])


def test_a_flow_that_starts_later_slows_the_first() -> None:
    assert completions([Flow(4.0, (0,)), Flow(1.0, (0,), start=2.0)], [1.0]).tolist() == approx([5.0, 4.0])
    assert completions([Flow(1.0, (0,)), Flow(1.0, (0,), start=9.0)], [1.0]).tolist() == approx([1.0, 10.0])
    assert completions([], [1.0]).tolist() == []


@pytest.mark.parametrize(("group", "rank_stride"), [(16, 1), (4, 8), (8, 4), (2, 16)])
def test_rings_as_flows_take_what_the_closed_form_says(group: int, rank_stride: int) -> None:
    """All rings of an axis over 32 devices at once, each step a flow from every rank to the next."""
    still = replace(PLAIN, start=0.0, link_latency=0.0, nic_latency=0.0)
    world, node = 32, still.devices_per_node
    # Links: out of and into each device, then out of and into each node.
    capacity = [still.link_bandwidth] * 2 * world + [still.nics * still.nic_bandwidth] * 2 * (world // node)
    flows = []
    for rank in range(world):
        place = rank // rank_stride % group
        to = rank + rank_stride * ((place + 1) % group - place)
        path = [rank, world + to]
        if rank // node != to // node:
            path += [2 * world + rank // node, 2 * world + world // node + to // node]
        flows.append(Flow(1e6 * (group - 1) / group, tuple(path)))
    assert completions(flows, capacity).max() == approx(float(all_gather(still, 1e6, group, rank_stride)))
