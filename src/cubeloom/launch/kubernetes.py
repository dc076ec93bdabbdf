"""The manifest of a job: a TrainJob of Kubeflow Trainer v2, and a ConfigMap with the job's settings."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from cubeloom.base.errors import UserError

_SETTINGS = "job.toml"
_VARIABLE = "CUBELOOM_JOB"
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A job on a Kubernetes cluster: one pod per node, in which torchrun starts the ranks."""

    name: str
    settings: str
    """All settings of the job, as TOML."""
    command: tuple[str, ...]
    """The command of each rank; the path of the settings is appended."""
    nodes: int
    ranks_per_node: int
    gpus: bool
    """Whether each rank needs a GPU."""
    image: str
    """A container image in which cubeloom is installed."""
    namespace: str | None = None
    runtime: str = "torch-distributed"
    claim: str | None = None
    """A PersistentVolumeClaim that all pods can write, for the run's folder and the data."""
    mount: str = "/work"
    """Its mount path, which is also the ranks' working directory."""
    restarts: int = 3

    def __post_init__(self) -> None:
        for what, name, form in (
            ("--name", self.name, _LABEL),
            ("--namespace", self.namespace, _LABEL),
            ("--runtime", self.runtime, _NAME),
            ("--claim", self.claim, _NAME),
        ):
            if name is not None and not form.fullmatch(name):
                raise UserError(
                    f"{what} {name!r}: Kubernetes takes small letters, digits and -, and a letter to begin with"
                )
        if not re.fullmatch(r"\S+", self.image):
            raise UserError(f"--image {self.image!r} is not the name of an image")
        if not PurePosixPath(self.mount).is_absolute():
            raise UserError(f"--mount {self.mount!r} is a folder in a pod, and begins with /")
        strange = next((each for each in self.settings if not each.isprintable() and each != "\n"), None)
        if strange is not None:
            raise UserError(f"the settings hold the character {strange!r}, which a manifest cannot")

    def text(self) -> str:
        return "\n".join([*self._config_map(), "---", *self._train_job()]) + "\n"

    def _config_map(self) -> list[str]:
        return [
            "# All settings of the job, as `cubeloom launch` resolved them.",
            "apiVersion: v1",
            "kind: ConfigMap",
            *self._metadata(),
            "data:",
            f"  {_SETTINGS}: |",
            *(f"    {line}".rstrip() for line in self.settings.splitlines()),
        ]

    def _metadata(self) -> list[str]:
        place = [] if self.namespace is None else [f"  namespace: {_text(self.namespace)}"]
        return ["metadata:", f"  name: {_text(self.name)}", *place]

    def _train_job(self) -> list[str]:
        return [
            "apiVersion: trainer.kubeflow.org/v1alpha1",
            "kind: TrainJob",
            *self._metadata(),
            "spec:",
            "  runtimeRef:",
            f"    name: {_text(self.runtime)}",
            "  trainer:",
            f"    image: {_text(self.image)}",
            f"    numNodes: {self.nodes}",
            f"    numProcPerNode: {self.ranks_per_node}",
            *self._resources(),
            "    env:",
            "      # As a variable and not as a file: any runtime passes it on, and needs no volume for it.",
            f"      - name: {_VARIABLE}",
            "        valueFrom:",
            "          configMapKeyRef:",
            f"            name: {_text(self.name)}",
            f"            key: {_SETTINGS}",
            "      # Ranks are processes: one thread each, or they fight for the cores.",
            "      - name: OMP_NUM_THREADS",
            '        value: "1"',
            "      # A pod that replaces another must find the rest: else torch's agents keep the address of the one before.",
            "      - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            '        value: "1"',
            '    command: ["bash", "-c"]',
            "    args:",
            f"      - {_text(self.script())}",
            *self._volume(),
        ]

    def script(self) -> str:
        """The command of a pod. The runtime sets PET_NNODES and the rendezvous; ranks fail and restart together."""
        settings = f"/tmp/{_SETTINGS}"
        begin = "" if self.claim is None else f"cd {shlex.quote(self.mount)} && "
        return (
            f'{begin}printf %s "${_VARIABLE}" > {settings} && exec torchrun --nproc-per-node={self.ranks_per_node} '
            f"--max-restarts={self.restarts} --rdzv-backend=c10d --rdzv-id={self.name} "
            '--rdzv-endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT" '
            f"--no-python {shlex.join(self.command)} {settings}"
        )

    def _resources(self) -> list[str]:
        if not self.gpus:
            return []
        each = f"        nvidia.com/gpu: {self.ranks_per_node}"
        return ["    resourcesPerNode:", "      requests:", each, "      limits:", each]

    def _volume(self) -> list[str]:
        """Shared memory, of which a pod has only 64 MB by default, too little for NCCL; and the claim."""
        volumes = ["- name: shared-memory", "  emptyDir:", "    medium: Memory"]
        mounts = ["- name: shared-memory", "  mountPath: /dev/shm"]
        if self.claim is not None:
            volumes += ["- name: work", "  persistentVolumeClaim:", f"    claimName: {_text(self.claim)}"]
            mounts += ["- name: work", f"  mountPath: {_text(self.mount)}"]
        return [
            "  # Trainer 2.2 and later; before, the same stood under podTemplateOverrides.",
            "  runtimePatches:",
            "    - manager: cubeloom.launch/volume",
            "      trainingRuntimeSpec:",
            "        template:",
            "          spec:",
            "            replicatedJobs:",
            "              - name: node",
            "                template:",
            "                  spec:",
            "                    template:",
            "                      spec:",
            "                        volumes:",
            *(f"                          {line}" for line in volumes),
            "                        containers:",
            "                          - name: node",
            "                            volumeMounts:",
            *(f"                              {line}" for line in mounts),
        ]


def _text(value: str) -> str:
    """A JSON string is a YAML string."""
    return json.dumps(value, ensure_ascii=False)
