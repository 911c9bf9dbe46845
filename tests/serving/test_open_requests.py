from contextlib import ExitStack

from cauc_ray.serving.open_requests import WINDOW_S, OpenRequests


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_more_are_expected_while_fewer_are_open_than_lately():
    clock = Clock()
    open_requests = OpenRequests(clock)
    with open_requests.one_more():
        assert not open_requests.expects_more()  # a client that is alone
    with ExitStack() as open_ones:
        for _ in range(5):
            open_ones.enter_context(open_requests.one_more())
        assert not open_requests.expects_more()  # all are here
    clock.now += WINDOW_S / 2
    with open_requests.one_more():
        assert open_requests.expects_more()
        clock.now += WINDOW_S
        assert open_requests.expects_more()
    clock.now += 3 * WINDOW_S
    with open_requests.one_more():
        assert not open_requests.expects_more()  # no client is left
