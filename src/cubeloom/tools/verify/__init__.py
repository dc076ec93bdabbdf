"""Is training on a grid the same as training the serial model? Run both and compare."""

from cubeloom.tools.verify.experiment import Experiment as Experiment
from cubeloom.tools.verify.report import Report as Report
from cubeloom.tools.verify.report import verify as verify
from cubeloom.tools.verify.serial import Serially as Serially
from cubeloom.tools.verify.serial import SerialRun as SerialRun
from cubeloom.tools.verify.serial import serial_of as serial_of
from cubeloom.tools.verify.serial import train_serially as train_serially
