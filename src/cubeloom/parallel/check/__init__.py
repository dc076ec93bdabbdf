"""Checks a cut by running its model twice without values: once with whole sizes, and once with the sizes of one rank.

The whole run records every operation between the declared layers. The rank's run follows the record with local sizes
and knows for each tensor which axes cut which dimension. An operation whose result on shards differs from that on the
whole is refused with its file and line, before anything is allocated.
"""

from cubeloom.parallel.check.check import check as check
from cubeloom.parallel.check.check import where_called as where_called
from cubeloom.parallel.check.inputs import Example as Example
from cubeloom.parallel.check.inputs import Given as Given
from cubeloom.parallel.check.record import Call as Call
from cubeloom.parallel.check.record import calls_of as calls_of
