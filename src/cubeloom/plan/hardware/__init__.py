"""Devices and clusters as data: every number in a TOML file, with its source and how far to trust it.

    from cubeloom.plan.hardware import cluster, device

    cluster("perlmutter").device.bandwidth        # bytes a second
    device("my-machine.toml")                     # as `cubeloom calibrate` writes it

Units are bytes, seconds and FLOP/s. A bandwidth is what a large transfer gets, not what the data sheet adds up.
"""

from cubeloom.plan.hardware.cluster import Cluster as Cluster
from cubeloom.plan.hardware.cluster import Tier as Tier
from cubeloom.plan.hardware.device import Device as Device
from cubeloom.plan.hardware.device import Dtype as Dtype
from cubeloom.plan.hardware.facts import Fact as Fact
from cubeloom.plan.hardware.files import cluster as cluster
from cubeloom.plan.hardware.files import clusters as clusters
from cubeloom.plan.hardware.files import device as device
from cubeloom.plan.hardware.files import devices as devices
from cubeloom.plan.hardware.files import written as written
from cubeloom.plan.hardware.software import Software as Software
from cubeloom.plan.hardware.uncertainty import uncertainty as uncertainty
