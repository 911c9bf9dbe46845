"""A run on a Ray session that is there, in a process that may be killed: pool, policy, input, output, address."""

import sys

import ray

import cauc_ray
from jobs.faults.cascade import small_blocks

if __name__ == "__main__":
    pool, policy, inputs, out, address = sys.argv[1:]
    small_blocks()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    cauc_ray.run(pool, policy, inputs, out)
