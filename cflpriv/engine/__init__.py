"""The engine: computes one task for many clients.

Algorithms say *what* clients compute, as tasks; this package decides *how*. `Engine.run` cuts the clients into chunks of like size, always
the same way, and computes each chunk

- `stacked`: the parameters of its clients are one set of tensors with a leading client axis, and one forward, backward and update serves
  all of them (`layers`, `sgd`): convolutions of all clients at once (`convolutions`), batched matrix products for linear layers;
- `span`: full-batch training of a one-hidden-layer network in the span of its samples, exactly, without ever forming a client's weights
  (`span`), when there are fewer samples than inputs;
- `vmap`: any other module that torch can vectorise;
- `native`: on the CPU, one client after the other by a compiled kernel (`native`), where it was built, knows the layers and is quicker;
- `sequential`: one client after the other, the reference that the others must equal (to 1e-12 in float64).

On a CUDA device chunks are as large as its memory allows (`memory`), and steps are replayed from a graph where they can be (`graphs`).
With `workers = N` chunks go to N persistent processes with one intra-op thread each. The results do not depend on N, because the chunks
and each chunk's arithmetic do not.
"""

from .device import Device
from .run import Engine
from .seam import Deferred, Later, LaterTask, ManyTask, Result, RunNow, Streams, Task, TaskInput, Value

__all__ = ["Deferred", "Device", "Engine", "Later", "LaterTask", "ManyTask", "Result", "RunNow", "Streams", "Task", "TaskInput", "Value"]
