"""A session whose work is done later and in order, as a GPU's stream does it."""

import random
from collections import deque

import torch

from kvforge.runtime.sessions.inputs import known_ids
from kvforge.runtime.sessions.session import Session
from tests.support.sessions.fake import POISON


class Later(torch.Tensor):
    """What queued work fills in. Whoever works on it on the host waits for that."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ not in ("__get__", "__len__"):  # sizes are known
            for one in args:
                if isinstance(one, Later):
                    one.queue.drain()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class Work:
    """A piece of queued work, and the tensor that it fills in."""

    def __init__(self, queue, function, shape, dtype):
        self.queue, self.function, self.is_done = queue, function, False
        self.ids = torch.full(shape, -9, dtype=dtype).as_subclass(Later)
        self.ids.queue = queue

    def collect(self):
        while not self.is_done:
            self.queue.do()
        self.queue.check()
        return self.ids.as_subclass(torch.Tensor)


class Queue:
    """Work in order, each piece when it is waited for, or when ``rng`` says so while more is queued. What fails is
    told to who waits next; what is queued until then is not done."""

    def __init__(self, rng):
        self.rng, self.work, self.is_working, self.error = rng, deque(), False, None

    def add(self, function, shape, dtype=torch.float32):
        work = Work(self, function, shape, dtype)
        self.work.append(work)
        for _ in range(self.rng.choice([0, 0, 1, len(self.work)])):
            self.do()
        return work

    @torch.inference_mode()
    def do(self):
        """The next piece."""
        if not self.work:
            return
        work, self.is_working = self.work.popleft(), True
        try:
            if self.error is None:
                work.ids.as_subclass(torch.Tensor).copy_(work.function())
        except Exception as error:
            self.error = error
        work.is_done, self.is_working = True, False

    def check(self):
        if self.error is not None:
            while self.work:
                self.do()
            error, self.error = self.error, None
            raise error

    def drain(self):
        if not self.is_working:
            while self.work:
                self.do()
            self.check()


class SimulatedDevice(Session):
    """Does what another session does, later; ``rng`` draws when."""

    runs_ahead = True

    def __init__(self, session, rng=None):
        self.session, self.manifest = session, session.manifest
        self.queue = Queue(rng or random.Random(0))
        self.num_ahead = self.num_steps = 0
        self.fails_at = None

    def allocate_pools(self, *counts):
        return self.session.allocate_pools(*counts)

    def lower(self, step, pools):
        step = copied(step)
        self.num_ahead += step.chosen is not None
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("the step cannot be launched")

        def work():
            if step.chosen is not None:
                known_ids(step, step.input_ids, step.chosen[1])
            return self.session.lower(step._replace(chosen=None), pools)

        return self.queue.add(work, (len(step.input_ids), self.manifest.model.hidden_size)).ids

    def device_logits(self, step, pools):
        step = copied(step)
        shape = len(step.survivor_index), self.manifest.vocab_size
        return self.queue.add(lambda: self.session.upper(step, pools), shape).ids

    def host_logits(self, logits):
        return logits.clone()

    def upper(self, step, pools):
        return self.host_logits(self.device_logits(step, pools))

    def launch(self, choose, num_rows):
        return self.queue.add(choose, (num_rows,), torch.int32)

    def verify(self, step):
        return self.session.verify(step)

    def poison_pages(self, pages):
        """Behind what is queued."""
        pages = list(pages)

        def work():
            self.session.poison_pages(pages)
            return torch.tensor(POISON)

        self.queue.add(work, ())


def copied(step):
    """A step as it stands now: the host goes on to use its buffers."""

    def copy(value):
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(map(copy, value))
        return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, Later) else value

    return step._replace(**{name: copy(value) for name, value in step._asdict().items()})
