"""Streams and events on a device where every operator has finished when the call returns.

So whatever order streams and events ask for is kept, queries say done, and waiting returns at once. What stays real is
identity (32 streams a device and priority, handed out in turn), the current stream of each thread, the stream that owns
a block in the allocator, the time between two events, and the errors of events that were never recorded.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from . import Emulation

A_POOL = 32
CUDA_TYPE = 1
POINTERS = 0x5000_0000_0000


def pointer(stream_id: int) -> int:
    """The number that stands for a stream's cudaStream_t: 0 for the default stream, as on hardware."""
    return 0 if stream_id == 0 else POINTERS + 64 * stream_id


def stream_types(emulation: Emulation) -> tuple[type, type, type]:
    """The classes that stand in for `torch.cuda.Stream`, `.ExternalStream` and `.Event`."""
    taken: dict[tuple[int, int], int] = {}

    class Stream(torch.Stream):
        """A stream of an emulated device."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            index = kwargs.get("device_index")
            stream_id = kwargs.get("stream_id")
            if index is None:
                index = emulation.index_or_current(device)
            if stream_id is None:
                pool = 0 if priority >= 0 else 1
                turn = taken[index, pool] = taken.get((index, pool), -1) + 1
                stream_id = 1 + pool * A_POOL + turn % A_POOL
            return super().__new__(cls, stream_id=stream_id, device_index=index, device_type=CUDA_TYPE)

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            """The number that stands for the cudaStream_t."""
            return pointer(self.stream_id)

        @property
        def priority(self) -> int:
            """-1 for a stream of the high-priority pool, else 0."""
            return -1 if A_POOL < self.stream_id <= 2 * A_POOL else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            """The lowest and the highest priority."""
            return (0, -5)

        def query(self) -> bool:
            """Whether all is done: always."""
            return True

        def synchronize(self) -> None:
            """Wait until all is done: it is."""

        def is_capturing(self) -> bool:
            """Whether a graph is captured from it: graphs are not emulated."""
            return False

        @property
        def native_handle(self) -> int:
            """As `cuda_stream`."""
            return self.cuda_stream

        def wait_event(self, event: Any) -> None:
            """Later work waits for the event: it does."""
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            """Later work waits for the stream's work: it does."""
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            """Record an event (a new one where none is given) on this stream."""
            event = Event() if event is None else event
            event.record(self)
            return event

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_stream)

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.cuda_stream)

        def __enter__(self) -> Any:
            thread = emulation.thread
            before = (thread.device, thread.streams.get(self.device_index, 0))
            thread.entered.append((self.device_index, *before))
            thread.device = self.device_index
            thread.streams[self.device_index] = self.stream_id
            return self

        def __exit__(self, *_: Any) -> None:
            thread = emulation.thread
            index, thread.device, thread.streams[index] = thread.entered.pop()

        def __eq__(self, other: object) -> bool:
            return (
                isinstance(other, torch.Stream)
                and self.stream_id == other.stream_id
                and self.device_index == other.device_index
            )

        def __hash__(self) -> int:
            return hash((self.stream_id, self.device_index))

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    class ExternalStream(Stream):
        """A stream that other code made: emulated, it is known by its number alone."""

        def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Any:
            known = 0 <= stream_ptr - POINTERS <= 64 * 2 * A_POOL
            number = (stream_ptr - POINTERS) // 64 if known else stream_ptr
            return super().__new__(cls, device, stream_id=number)

        def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
            pass

    class Event:
        """An event of an emulated device."""

        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            if interprocess and enable_timing:
                raise RuntimeError("CUDA error: invalid argument (an interprocess event cannot measure time)")
            self._timing, self._interprocess = enable_timing, interprocess
            self._at: float | None = None
            self._device: torch.device | None = None

        @property
        def device(self) -> torch.device | None:
            """Where it was recorded; None before."""
            return self._device

        @property
        def cuda_event(self) -> int:
            """The number that stands for the cudaEvent_t; 0 before it is recorded."""
            return 0 if self._device is None else id(self)

        def record(self, stream: Any = None) -> None:
            """Note the moment, on `stream` or the current one."""
            stream = torch.cuda.current_stream() if stream is None else stream
            if self._device is not None and self._device != stream.device:
                raise RuntimeError(
                    f"Event device {self._device.index} does not match recording stream's device {stream.device.index}."
                )
            self._device = stream.device
            self._at = time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            """Later work of the stream waits for the event: it does."""

        def query(self) -> bool:
            """Whether all that was recorded is done: always."""
            return True

        def synchronize(self) -> None:
            """Wait until all that was recorded is done: it is."""

        def elapsed_time(self, end_event: Any) -> float:
            """Milliseconds from this event to `end_event`, as this process's clock saw them."""
            if not (self._timing and end_event._timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._at is None or end_event._at is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return (end_event._at - self._at) * 1e3

        def ipc_handle(self) -> bytes:
            """A handle that `from_ipc_handle` takes in another process."""
            if not self._interprocess:
                raise RuntimeError("CUDA error: invalid resource handle (the event is not interprocess)")
            self._device = self._device or torch.device("cuda", emulation.thread.device)
            return b"emulated event".ljust(64, b"\0")

        @classmethod
        def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
            """The event behind another process's handle; what was recorded there is done."""
            event = cls(interprocess=True)
            event._device = torch.device("cuda", emulation.index_or_current(device))
            return event

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_event)

        def __repr__(self) -> str:
            number = self.cuda_event
            return f"<torch.cuda.Event {number:#x}>" if number else "<torch.cuda.Event uninitialized>"

    for kind in (Stream, ExternalStream, Event):
        kind.__module__, kind.__qualname__ = "torch.cuda.streams", kind.__name__
    return Stream, ExternalStream, Event
