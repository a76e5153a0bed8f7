"""Who holds what leaks: an attribute, a closure, a module-level cache, the autograd graph behind a kept loss, a kept
exception's traceback, a suspended generator, a thread's local variable, a context variable, the context of a
function of autograd. Each is named in the message.
"""

EXPECT = {
    "test_attribute": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- attribute"},
        "says": ["closure engine -> .store -> [", "(retained)"],
    },
    "test_loss_keeps_the_graph": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.mechanism": "retained"},
        "says": ["closure losses", "grad_fn", "_saved_"],
    },
    "test_exception_keeps_the_frame": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- raised"},
        "says": ["traceback of ValueError", "local block of"],
    },
    "test_suspended_generator": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- suspended"},
        "says": ["suspended ", "local block"],
    },
    "test_function_cache": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- cached"},
        "says": ["(retained)"],
    },
    "test_thread": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- thread"},
        "says": ["in worker", "local block"],
    },
}
EXPECT |= {
    "test_context_variable": {
        "outcome": "failed",
        "report": {"live_bytes.0.sites.0.site": "<- in a context", "live_bytes.0.sites.0.mechanism": "retained"},
        "says": ["ContextVar requests -> ["],
    },
    "test_a_context_variable_that_is_reset": {
        "outcome": "passed",
        "report": {"live_bytes.0.verdict": "flat"},
    },
    "test_function_of_autograd": {
        "outcome": "failed",
        "report": {"live_bytes.0.sites.0.mechanism": "retained"},
        "says": [".grad_fn -> ScaleBackward"],
    },
}
ARGS = ["--sglmem-world", "1"]


def attribute():
    import torch

    class Engine:
        def __init__(self):
            self.store = {}

    engine = Engine()

    def step(_):
        engine.store[f"request-{len(engine.store)}"] = torch.zeros(256, device="cuda")  # <- attribute

    return step


def loss_history():
    import torch

    weight = torch.ones(256, device="cuda", requires_grad=True)
    losses = []

    def step(_):
        hidden = torch.full((256,), 2.0, device="cuda")
        losses.append((weight * hidden).sum())

    return step


def kept_exception():
    import torch

    errors = []

    def fails():
        block = torch.zeros(256, device="cuda")  # <- raised
        raise ValueError(f"no room for {block.numel()}")

    def step(_):
        try:
            fails()
        except ValueError as error:
            errors.append(error)

    return step


def generators():
    import torch

    streams = []

    def stream():
        block = torch.zeros(256, device="cuda")  # <- suspended
        yield 1
        del block

    def step(_):
        streams.append(stream())
        next(streams[-1])

    return step


def function_cache():
    import functools

    import torch

    calls = iter(range(10**9))

    @functools.cache
    def mask(number):
        return torch.zeros(256, device="cuda")  # <- cached

    def step(_):
        mask(next(calls))

    return step


def thread():
    import threading

    import torch

    done = threading.Event()

    def worker(ready):
        block = torch.zeros(256, device="cuda")  # <- thread
        ready.set()
        done.wait()
        del block

    def step(_):
        ready = threading.Event()
        threading.Thread(target=worker, args=(ready,), daemon=True).start()
        ready.wait()

    return step


def context_variable():
    import contextvars

    import torch

    requests = contextvars.ContextVar("requests")
    requests.set([])

    def step(_):
        requests.get().append(torch.zeros(256, device="cuda"))  # <- in a context

    return step


def context_variable_reset():
    import contextvars

    import torch

    request = contextvars.ContextVar("request")

    def step(_):
        token = request.set(torch.zeros(256, device="cuda"))
        request.reset(token)

    return step


def function_of_autograd():
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, mask):
            ctx.mask = mask
            return weight.sum() * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.mask, None

    weight = torch.ones(256, device="cuda", requires_grad=True)
    losses = []

    def step(_):
        losses.append(Scale.apply(weight, torch.ones(1 << 12, device="cuda")))

    return step


def test_context_variable(world, live_bytes):
    live_bytes.assert_flat(world.trace(context_variable, [0], cycles=3))


def test_a_context_variable_that_is_reset(world, live_bytes):
    live_bytes.assert_flat(world.trace(context_variable_reset, [0], cycles=3))


def test_function_of_autograd(world, live_bytes):
    live_bytes.assert_flat(world.trace(function_of_autograd, [0], cycles=3))


def test_attribute(world, live_bytes):
    live_bytes.assert_flat(world.trace(attribute, [0], cycles=3))


def test_loss_keeps_the_graph(world, live_bytes):
    live_bytes.assert_flat(world.trace(loss_history, [0], cycles=3))


def test_exception_keeps_the_frame(world, live_bytes):
    live_bytes.assert_flat(world.trace(kept_exception, [0], cycles=3))


def test_suspended_generator(world, live_bytes):
    live_bytes.assert_flat(world.trace(generators, [0], cycles=3))


def test_function_cache(world, live_bytes):
    live_bytes.assert_flat(world.trace(function_cache, [0], cycles=3))


def test_thread(world, live_bytes):
    live_bytes.assert_flat(world.trace(thread, [0], cycles=3))
