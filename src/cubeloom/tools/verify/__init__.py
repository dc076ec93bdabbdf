"""Checks that training on a grid equals training the serial model: runs both and compares."""

from cubeloom.tools.verify.experiment import Experiment as Experiment
from cubeloom.tools.verify.report import Report as Report
from cubeloom.tools.verify.report import verify as verify
from cubeloom.tools.verify.serial import Serially as Serially
from cubeloom.tools.verify.serial import SerialRun as SerialRun
from cubeloom.tools.verify.serial import serial_of as serial_of
from cubeloom.tools.verify.serial import train_serially as train_serially
