"""The manifest that `cubeloom launch kubernetes` writes, and what a pod would run of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cubeloom import UserError
from cubeloom.base.settings import load
from cubeloom.cli.launch import Kubernetes
from cubeloom.launch.kubernetes import TrainJob
from cubeloom.train.job import Job

from .manifests import faults

STANDIN = Path(__file__).with_name("standin.py")
FILE = """
folder = "runs/größe"
restarts = 1
[grid]
x = 2
data = 4
[data]
sources = [{folder = "/data/tokens"}]
"""


SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "My job_1.toml"
    path.write_text(FILE)
    return path


def manifest(file: Path, *overrides: str, **options: Any) -> TrainJob:
    return Kubernetes(file=file, overrides=overrides, **options).manifest(load(Job, file, overrides))


def parts(made: TrainJob) -> tuple[Any, Any]:
    config_map, train_job = yaml.safe_load_all(made.text())
    return config_map, train_job


def test_the_settings_travel_whole(file: Path, tmp_path: Path) -> None:
    config_map, train_job = parts(manifest(file, "steps=7", namespace="team"))
    assert (config_map["apiVersion"], config_map["kind"]) == ("v1", "ConfigMap")
    assert config_map["metadata"] == train_job["metadata"] == {"name": "my-job-1", "namespace": "team"}
    (tmp_path / "again.toml").write_text(config_map["data"]["job.toml"])
    assert load(Job, tmp_path / "again.toml") == load(Job, file, ["steps=7"])


def test_a_train_job_of_kubeflow(file: Path) -> None:
    _, train_job = parts(manifest(file, "device=cuda", image="registry/cubeloom:1", gpus_per_node=4))
    assert (train_job["apiVersion"], train_job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert train_job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 4, "registry/cubeloom:1")
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}, "requests": {"nvidia.com/gpu": 4}}
    assert trainer["env"][0]["valueFrom"] == {"configMapKeyRef": {"name": "my-job-1", "key": "job.toml"}}
    assert trainer["args"][0].endswith("--no-python cubeloom train /tmp/job.toml")
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in trainer["env"]
    [patch] = train_job["spec"]["runtimePatches"]
    pod = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"] == [SHARED_MEMORY]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert "namespace" not in train_job["metadata"]


def test_a_volume_for_the_run(file: Path) -> None:
    _, train_job = parts(manifest(file, claim="runs", mount="/mnt/my runs"))
    [patch] = train_job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node")
    assert pod["volumes"] == [SHARED_MEMORY, {"name": "work", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert pod["containers"][0]["volumeMounts"][1:] == [{"name": "work", "mountPath": "/mnt/my runs"}]
    assert train_job["spec"]["trainer"]["args"][0].startswith("cd '/mnt/my runs' && ")
    assert "resourcesPerNode" not in train_job["spec"]["trainer"]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ((), {}),
        (("device=cuda",), {"gpus_per_node": 4, "namespace": "team"}),
        (("device=cuda",), {"claim": "runs", "mount": "/mnt/my runs"}),
    ],
)
def test_the_apis_know_every_field(file: Path, overrides: tuple[str, ...], options: dict[str, Any]) -> None:
    assert faults(manifest(file, *overrides, **options).text()) == []


@pytest.mark.parametrize(
    "key",
    [
        *(
            "apiVersion",
            "kind",
            "metadata",
            "data",
            "spec",
            "runtimeRef",
            "numNodes",
            "numProcPerNode",
            "image",
            "args",
        ),
        *("resourcesPerNode", "limits", "valueFrom", "configMapKeyRef", "runtimePatches", "trainingRuntimeSpec"),
        *("replicatedJobs", "volumes", "emptyDir", "medium", "persistentVolumeClaim", "claimName", "mountPath"),
    ],
)
def test_a_misspelled_field_is_found(file: Path, key: str) -> None:
    text = manifest(file, "device=cuda", claim="runs").text()
    assert f"{key}:" in text
    wrong = re.sub(rf"^([ -]*){key}:", rf"\1{key}s:", text, flags=re.MULTILINE)
    assert wrong != text
    assert faults(wrong)


def test_a_number_given_as_text_is_found(file: Path) -> None:
    text = manifest(file).text()
    assert faults(text.replace("numNodes: 1", 'numNodes: "1"'))
    assert faults(text.replace('value: "1"', "value: 1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "My_job"}, "--name 'My_job': Kubernetes takes small letters"),
        ({"name": "1st"}, "a letter to begin with"),
        ({"namespace": "a/b"}, "--namespace 'a/b'"),
        ({"claim": "a\nb"}, "--claim"),
        ({"image": "a image"}, "--image 'a image' is not the name of an image"),
        ({"claim": "runs", "mount": "work"}, "--mount 'work' is a folder in a pod"),
        ({"nodes": 3}, "cannot lie evenly on 3 nodes"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        manifest(file, **options)
    assert message in str(caught.value)


def test_a_character_that_would_change_on_the_way_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"the character '\\u2028'"):
        replace(manifest(file), settings='folder = "a\u2028b"\n')


def test_the_command_checks_all_but_what_is_in_the_pod(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.yaml"
    assert Kubernetes(file=file, output=out)() == 0  # /data/tokens is not here
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text() == manifest(file).text()
    assert Kubernetes(file=file, output=out, overrides=("device=cuda", "layout.record=true", "grid.x=1"))() == 0
    out.unlink()
    with pytest.raises(UserError, match="use device = 'cuda'"):
        Kubernetes(file=file, output=out, overrides=("layout.record=true", "grid.x=1"))()
    with pytest.raises(UserError, match="cannot be cut over x=5"):
        Kubernetes(file=file, output=out, overrides=("grid.x=5",))()
    assert sorted(tmp_path.iterdir()) == [file]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_pods_come_together(file: Path, tmp_path: Path) -> None:
    """What the manifest runs, with the variables that the runtime would set, twice on this machine."""
    made = replace(
        manifest(file, "grid.data=2", nodes=2), command=(sys.executable, str(STANDIN), str(tmp_path), "fail-once")
    )
    config_map, train_job = parts(made)
    trainer = train_job["spec"]["trainer"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = []
    for node in range(2):
        # Each has a /tmp of its own in a cluster; here they share one.
        script = trainer["args"][0].replace("/tmp/job.toml", str(tmp_path / f"settings-{node}.toml"))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CUBELOOM_JOB": config_map["data"]["job.toml"],
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        pods.append(subprocess.Popen([*trainer["command"], script], env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [pod.communicate(timeout=240)[1] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    ranks = [json.loads((tmp_path / f"rank-{rank}-1.json").read_text()) for rank in range(4)]
    assert [each["local_rank"] for each in ranks] == [0, 1, 0, 1]
    assert {(each["world"], each["restart"], each["by"]) for each in ranks} == {(4, 1, "torchrun")}
    assert load(Job, tmp_path / "settings-0.toml") == load(Job, file, ["grid.data=2"])
