from contextlib import ExitStack

from cauc_ray.serving.open_requests import WINDOW_S, OpenRequests


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_more_are_expected_while_fewer_are_open_than_lately():
    clock = Clock()
    crowd = OpenRequests(clock)
    with crowd.one_more():
        assert not crowd.expects_more()  # a client that is alone
    with ExitStack() as open_ones:
        for _ in range(5):
            open_ones.enter_context(crowd.one_more())
        assert not crowd.expects_more()  # all are here
    clock.now += WINDOW_S / 2
    with crowd.one_more():
        assert crowd.expects_more()
        clock.now += WINDOW_S
        assert crowd.expects_more()
    clock.now += 3 * WINDOW_S
    with crowd.one_more():
        assert not crowd.expects_more()  # the crowd has gone home
