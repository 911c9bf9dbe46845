"""A GPU that does not exist, for what is measured on one."""

from __future__ import annotations


class Gpu:
    """A device whose clock goes on as a test has it; it does all work at once."""

    def __init__(self):
        self.now_s = 0.0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu, self.at_s = gpu, None

    def record(self):
        self.at_s = self.gpu.now_s

    def synchronize(self):
        assert self.at_s is not None

    def elapsed_time(self, later):
        return 1000 * (later.at_s - self.at_s)
