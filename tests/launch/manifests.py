"""Checks a manifest against the types that the APIs publish: Kubernetes' own JSON schemas, and Kubeflow Trainer's models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import yaml

VERSION = kubernetes_validate.latest_version()


def faults(manifest: str) -> list[str]:
    """What an API server would refuse or drop; nothing if the manifest is right."""
    found: list[str] = []
    for each in yaml.safe_load_all(manifest):
        found += _of_train_job(each) if each.get("kind") == "TrainJob" else _of_kubernetes(each)
    return found


def _of_kubernetes(part: Mapping[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(dict(part), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    except (kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        return [f"no such kind: {error!r}"]
    return []


def _of_train_job(part: dict[str, Any]) -> list[str]:
    """Its own fields, and the pod that the runtime would create from it."""
    # A second to import, which every process that collects tests would take.
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    try:
        read = models.TrainerV1alpha1TrainJob.from_dict(part)
    except ValidationError as error:
        return [str(each) for each in error.errors()]
    # The models ignore what they do not know, as an API server does: what was dropped was misspelled.
    found = list(_dropped(part, read.to_dict()))
    return found or [fault for pod in _pods(part) for fault in _of_kubernetes(pod)]


def _dropped(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(kept, Mapping) or key not in kept:
                yield f"{path}.{key} is not a field"
            else:
                yield from _dropped(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for place, value in enumerate(given):
            yield from _dropped(value, kept[place], f"{path}[{place}]")
    elif given != kept:
        yield f"{path} is read as {kept!r}"


def _pods(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    trainer = part["spec"]["trainer"]
    from_trainer = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
    for patch in part["spec"]["runtimePatches"]:
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]["template"]["spec"]
            resources = {"resources": trainer["resourcesPerNode"]} if "resourcesPerNode" in trainer else {}
            containers = [{**from_trainer, **resources, **each} for each in spec["containers"]]
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": part["metadata"],
                "spec": {**spec, "containers": containers},
            }
