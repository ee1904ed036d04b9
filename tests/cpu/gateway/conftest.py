"""One gateway over a fake Triton for all tests of its protocol: no engine, only an engine directory's files."""

import asyncio
import gc
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest

from kvforge.gateway.http.server import listen, make_server
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests import reading
from tests.cpu.gateway.chat_template import TEMPLATE
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton, run_fake_triton
from tests.cpu.gateway.http_calls import WAIT_S


@pytest.fixture(scope="session", autouse=True)
def one_worker() -> Iterator[None]:
    """A gateway that a test starts here has one worker, not three, each of which takes half a second of a core to
    start; those that are processes of their own have all."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "NUM_WORKERS", 1)
        yield


@pytest.fixture(scope="session")
def engine_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_files(tmp_path_factory.mktemp("gateway") / "tiny")


@pytest.fixture(scope="session")
def _fake() -> Iterator[tuple[FakeTriton, str]]:
    with run_fake_triton() as running:
        yield running


@pytest.fixture
def triton(_fake: tuple[FakeTriton, str]) -> Iterator[FakeTriton]:
    """The fake, as new, also for the next test: one that asks for ``url`` alone finds it so, too."""
    fake = _fake[0]
    fake.reset()
    yield fake
    fake.reset()


_now = time.monotonic


class TrueClock(asyncio.SelectorEventLoop):
    """A loop that sees no clock that a test puts in the place of time.monotonic: a sleep that began by another clock
    ends when the true one gets there, and a gateway lives as long as its process's tests."""

    def time(self) -> float:
        return _now()


@contextmanager
def run_gateway(options: GatewayOptions) -> Iterator[str]:
    """A gateway in a thread; gives its URL without /v1."""
    server = make_server(options)
    sock = listen(options)
    loop = TrueClock()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        if thread.is_alive():
            warnings.warn(f"a gateway goes on: {what_goes_on(thread)}", stacklevel=1)
        else:
            loop.close()


def what_goes_on(thread: threading.Thread) -> str:
    """Where a thread is, and where the unfinished tasks of all loops are."""
    tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done()]
    frames = [frame for task in tasks for frame in task.get_stack()]
    places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
    return "\n".join([*traceback.format_stack(sys._current_frames()[thread.ident or 0]), *places])


@pytest.fixture(scope="session")
def url(engine_files: Path, _fake: tuple[FakeTriton, str]) -> Iterator[str]:
    """A gateway with the options' defaults."""
    with run_gateway(GatewayOptions(engine=engine_files, grpc=_fake[1], port=0)) as found:
        yield found


@contextmanager
def starter(engine_files: Path, grpc: str) -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            run_gateway(GatewayOptions(**{"engine": engine_files, "grpc": grpc, "port": 0, **options}))
        )


@pytest.fixture
def start(engine_files: Path, _fake: tuple[FakeTriton, str]) -> Iterator[Callable[..., str]]:
    """Starts a gateway with options of the test's own."""
    with starter(engine_files, _fake[1]) as start_one:
        yield start_one


@pytest.fixture(scope="module")
def start_shared(engine_files: Path, _fake: tuple[FakeTriton, str]) -> Iterator[Callable[..., str]]:
    """Starts a gateway with options of the file's own: its worker takes half a second to start."""
    with starter(engine_files, _fake[1]) as start_one:
        yield start_one


@pytest.fixture(scope="module")
def url_of_template(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gateway with TEMPLATE."""
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    return start_shared(chat_template=template)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
