"""Which job a process is part of, as its variables say. The Slurm ones were read off a real step of Slurm 22.05."""

from __future__ import annotations

import pytest

from cubeloom import UserError
from cubeloom.launch.environment import Membership, first_host, membership

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
POD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NPROC_PER_NODE": "auto",
}
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "node[03-05,7]",
}
SRUN = BATCH | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[03-04]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}


def found(variables: dict[str, str]) -> Membership:
    member = membership(variables)
    assert member is not None
    return member


def test_torchrun() -> None:
    assert found(TORCHRUN) == Membership(
        rank=5, world=8, local_rank=1, address="node1", port=29500, restart=2, by="torchrun", hosted=True
    )


def test_a_pod_of_a_pytorch_job_is_one_rank() -> None:
    assert found(POD) == Membership(rank=1, world=2, local_rank=0, address="job-master-0", port=23456, by="pod")


def test_srun() -> None:
    assert found(SRUN) == Membership(rank=3, world=4, local_rank=1, address="node03", port=10_077, by="srun")
    assert found(SRUN | {"SLURM_RESTART_COUNT": "1"}).restart == 1
    assert found(SRUN | {"MASTER_ADDR": "ib-node03", "MASTER_PORT": "1234"}).address == "ib-node03"


@pytest.mark.parametrize(
    ("variables", "alone"),
    [
        (TORCHRUN, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, True),
        (SRUN, False),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2"}, False),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, True),
        (MPIRUN, True),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, False),
        (POD, False),
    ],
)
def test_whether_all_ranks_are_on_this_machine(variables: dict[str, str], alone: bool) -> None:
    assert found(variables).one_machine == alone


def test_steps_and_jobs_meet_at_ports_of_their_own() -> None:
    ports = {
        found(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4_000_000, 4_000_100)
        for step in range(4)
    }
    assert len(ports) == 400
    assert 10_000 <= min(ports) <= max(ports) < 30_000


def test_mpirun_on_one_machine() -> None:
    member = found(MPIRUN)
    assert (member.rank, member.world, member.local_rank, member.address) == (1, 2, 1, "127.0.0.1")
    assert member.by == "mpirun"
    assert member.port == found(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).port
    assert member.port != found(MPIRUN | {"PMIX_NAMESPACE": "prterun-host-2@1"}).port


def test_mpirun_on_several_machines_has_to_say_where_ranks_meet() -> None:
    several = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="-x MASTER_ADDR=HOST"):
        membership(several)
    assert found(several | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}).address == "node1"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
        {"PET_NNODES": "1"},
        {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node1"},  # salloc on a login node
        BATCH,  # the script itself, of which Slurm says that it is task 0 of 4
        SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_there_is_no_job(variables: dict[str, str]) -> None:
    assert membership(variables) is None


def test_the_innermost_launcher_counts() -> None:
    assert found(SRUN | MPIRUN | TORCHRUN).by == "torchrun"
    assert found(SRUN | MPIRUN).by == "mpirun"  # which starts its helpers by srun
    assert found(BATCH | MPIRUN).by == "mpirun"


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK is set, and WORLD_SIZE not"),
        (without(TORCHRUN, "MASTER_ADDR"), "RANK is set, and MASTER_ADDR not"),
        (without(without(TORCHRUN, "MASTER_ADDR"), "MASTER_PORT"), "and MASTER_ADDR, MASTER_PORT not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE and LOCAL_RANK set, and RANK not"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK = '-1' should be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE = 'four' should be a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "9"}, "local rank 9 in a job of 8"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "port 70000"),
        (POD | {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16"}, "PET_NPROC_PER_NODE = 8 and LOCAL_RANK is not set"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "PET_NNODES = 2: this is one of the pods of a TrainJob"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE = 8, but srun started 4 ranks"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[03"}, "SLURM_STEP_NODELIST = 'node[03' is not a list"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_half_a_job_is_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        membership(variables)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("node[03-05,7]", "node03"),
        ("node[7,03-05]", "node7"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]-node[010-012].site,other", "rack2-node010.site"),
        ("gpu-1,gpu-2", "gpu-1"),
    ],
)
def test_the_first_of_the_machines(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[", "node]", "node[a-b]", ",a", "a b"])
def test_what_is_no_list_of_machines(nodes: str) -> None:
    with pytest.raises(UserError, match="not a list of machines"):
        first_host(nodes)
