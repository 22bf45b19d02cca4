"""User code in worker processes: a crash, leak or endless loop costs the one piece of work it befell.

`WorkerPool` (the parent's side) starts a *zygote* per version of a code file, which imports the code once and forks
warm workers on demand. What a worker does with the code is an *adapter*: `module:function`, called as
`await adapter(function, payload, emit)`. This package knows neither episodes nor rewards nor the bus.
"""
