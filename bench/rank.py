"""Rank 0 of a large job, alone on one device: what its step takes besides the network, ours beside torch's.

Both run under torch's `fake` backend: every collective is done at once and carries nothing, so that what is left is the
rank's own work: kernels, copies around collectives, and Python. Optimizers step too. Losses mean nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.ours import number_type, our_adamw, our_config, tokens_of
from bench.peers import sharded
from bench.peers.gpt import adamw, mean_loss
from bench.peers.llama import Llama, LlamaSize
from bench.peers.timing import Compared, Step, Timed, take_turns
from cubeloom import Grid
from cubeloom.comm import Network, devices, world
from cubeloom.models import OurModel, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.parameter import Block
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import GraphRecord
from cubeloom.tools.rehearse.boundaries import boundaries
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Known

Peer = Literal["FSDP2", "DTensor", "DTensor, sequence parallel", "1F1B"]
OURS = "cubeloom"


@dataclass(frozen=True)
class Job:
    """One decomposition, and what of torch's does the same; of `x=2,y=4` what cuts over as many ranks."""

    grid: Grid
    peer: Peer
    rest: ShardingPolicy = field(default_factory=ShardingPolicy)
    microbatches: int = 1

    @property
    def samples(self) -> int:
        """One sequence on each rank of data and z, or for each micro-batch."""
        return self.grid.data * self.grid.z * self.microbatches


JOBS = {
    "FSDP 64": Job(Grid(z=64), "FSDP2"),
    "TP 8": Job(Grid(y=8), "DTensor", ShardingPolicy(activations="replicated")),
    "TP 8, sequence parallel": Job(Grid(y=8), "DTensor, sequence parallel", ShardingPolicy(inputs="regathered")),
    "x=2,y=4": Job(Grid(x=2, y=4), "DTensor"),
    "pipe=8": Job(Grid(pipe=8), "1F1B", microbatches=8),
}
# Blocks of Llama 3 at their true sizes, as many as are computed in a second or two. A pipeline has so many on each rank.
SIZES = {
    "8B": LlamaSize(layers=4, hidden=4096, heads=32, kv_heads=8, mlp_hidden=14336, sequence=4096, samples=1),
    "70B": LlamaSize(layers=2, hidden=8192, heads=64, kv_heads=8, mlp_hidden=28672, sequence=4096, samples=1),
}
TINY = LlamaSize(layers=1, hidden=64, heads=8, kv_heads=8, mlp_hidden=128, sequence=16, samples=1, vocab=64)


def measure(
    title: str, job: Job, size: LlamaSize, kind: devices.Kind, rounds: int, steps: int, *, profiled: bool = False
) -> Compared:
    """Recipes of one job take turns. What fails is left out and told, but ours."""
    size = replace(size, samples=job.samples, layers=size.layers * job.grid.pipe)
    device = devices.use(kind, 0)
    known = _known(job, size)
    recipes: dict[str, Step] = {}
    failed: list[str] = []
    with rank_0_of(job.grid.world), nullcontext() if kind != devices.CPU else torch.compiler.set_stance("force_eager"):
        network = Network(job.grid, device)
        for words, record in [("", False)] + [(", recorded", True)] * (kind != devices.CPU):
            recipes[OURS + words] = ours(job, size, network, known, record=record)
        for words, compiled in (("", False), (", compiled blocks", True)):
            name = f"torch {job.peer}{words}"
            try:
                step = theirs(job, size, device, compiled)
                step()
                recipes[name] = step
            except Exception as error:
                failed.append(f"{name}, which fails: {type(error).__name__}: {str(error).splitlines()[0]}")
        timed: list[Timed] = take_turns(recipes, device, rounds, steps, profiled=profiled)
        recipes.clear()
    world.forget()
    peers = [each for each in timed if not each.name.startswith(OURS)]
    best = min(peers or timed, key=lambda each: each.step_ms)
    share = job.grid.y * job.grid.x * job.grid.pipe * job.grid.z
    return Compared(title, timed, best.name, size.tokens // job.grid.z, size.teraflops / share, failed=failed)


@contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _known(job: Job, size: LlamaSize) -> Known | None:
    """What stages hand to one another, which the other ranks would tell."""
    if job.grid.pipe == 1:
        return None
    schedule = generate("1f1b", job.grid.pipe, job.microbatches)
    experiment = Experiment(
        model=OurModel(our_config(size), "llama"),
        grid=job.grid,
        batch=Batch(size.samples, size.sequence),
        rest=job.rest,
        dtype=torch.bfloat16,
        schedule=schedule,
    )
    try:
        return boundaries(experiment, schedule)
    finally:
        world.forget()


def ours(job: Job, size: LlamaSize, network: Network, known: Known | None, *, record: bool) -> Callable[[], Tensor]:
    """As `train` runs it, compiled."""
    with torch.device("meta"):
        model = build(our_config(size))
    numbers = torch.Generator(network.device).manual_seed(0)
    dtype = number_type(network.device.type)

    def fill(name: str, block: Block) -> Tensor:
        return (0.02 * torch.randn(block.local, generator=numbers, device=network.device)).to(dtype)

    pipeline = Pipeline(
        model,
        cut_of(model),
        network,
        Batch(size.samples, size.sequence),
        fill,
        generate("1f1b", job.grid.pipe, job.microbatches),
        job.rest,
        compile=True,
        record=GraphRecord() if record else None,
    )
    tokens, targets = tokens_of(size, network.device)
    data = network.shard({"tokens": tokens, "targets": targets})
    pipeline.learn(data, known)
    optimizer = our_adamw(pipeline.parameters, pipeline.gradients, network)

    def step() -> Tensor:
        loss = pipeline.launch(data)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def theirs(job: Job, size: LlamaSize, device: torch.device, compiled: bool) -> Step:
    """The plain recipe of torch, filled with random weights after it has been cut."""
    dtype = number_type(device.type)
    mesh = init_device_mesh(device.type, (job.grid.world,))
    tokens, targets = tokens_of(replace(size, samples=job.samples // job.grid.z), device)
    with torch.device("meta"):
        model: nn.Module = _FirstStage(size) if job.peer == "1F1B" else Llama(size)
    model = model.to(dtype)
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        if compiled:
            block.compile()
    if job.peer == "FSDP2":
        for module in (*blocks.children(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    elif job.peer != "1F1B":
        parallelize_module(model, mesh, plan(size, sequences=job.peer != "DTensor"), src_data_rank=None)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    for module in model.modules():
        if isinstance(module, Llama | _FirstStage):
            Llama.tabulate(module, torch.empty(0, device=device, dtype=dtype))  # type: ignore[arg-type]
    optimizer = adamw(model)
    if isinstance(model, _FirstStage):
        run = _pipelined(model, job, size, device, dtype, tokens)
    else:
        lossy = loss_parallel if job.peer != "FSDP2" else nullcontext

        def run() -> None:
            with lossy():
                model(tokens, targets).backward()

    def step() -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plan(size: LlamaSize, *, sequences: bool) -> dict[str, ParallelStyle]:
    """That of GPT in `peers.sharded`, for Llama's layers."""
    layers: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "up": ("gate", "up"), "positions": ()}
    found: dict[str, ParallelStyle] = {}
    for name, style in sharded.plan(size.layers, sequences).items():
        owner, dot, layer = name.rpartition(".")
        found |= {f"{owner}{dot}{each}": style for each in layers.get(layer, (layer,))}
    return found


class _FirstStage(nn.Module):
    """The table and the first blocks."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        whole = Llama(replace(size, layers=size.layers // 8))
        self.size, self.embed, self.blocks = size, whole.embed, whole.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def _pipelined(
    part: nn.Module, job: Job, size: LlamaSize, device: torch.device, dtype: torch.dtype, tokens: Tensor
) -> Callable[[], None]:
    handed = torch.empty(1, size.sequence, size.hidden, device="meta", dtype=dtype, requires_grad=True)
    stage = _Stage(part, 0, job.grid.pipe, device, input_args=(tokens[:1].to("meta"),), output_args=(handed,))
    schedule = Schedule1F1B(stage, n_microbatches=job.microbatches, loss_fn=mean_loss)
    return lambda: schedule.step(tokens, return_outputs=False)


class _Stage(pipelining.PipelineStage):
    """Its shapes are given. Torch 2.13 asks the other ranks whether theirs are as well; nobody is there to say yes."""

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.device)
