"""The table of targets: `python -m benchmarks`.

harness.py       rows, cases and targets, and how they are timed
render.py        the Markdown table, the JSON, the machine
rows_call.py     calls in compiled programs
rows_devices.py  calls in programs over several devices
rows_parallel.py parallel rows on pools
rows_threads.py  Python code on one thread and on two
rows_growth.py   the cost of one among many
rows_around.py   dispatch, eager calls, import, tracing
by_hand.py       the floor under tracing and lowering a call
rows_tap.py      taps
rows_feed.py     feeds
rows_drop_in.py  the drop-ins beside JAX's callbacks
rows_buffers.py  buffer callbacks
rows_host.py     host functions with derivatives
rows_bridge.py   the torch bridge
rows_tools.py    progress bars
rows_recorder.py recorders
rows_trace.py    what a trace adds to a call and a tap
rows_watch.py    watches
rows_observe.py  programs that are observed
rows_gpu.py      calls and taps on a GPU

And the pictures of docs/speed.md, `python -m benchmarks --pictures docs/pictures`:

sweeps.py          what is measured, over which sizes, and speed.json
sweep_parts.py     programs: a call, a tap, a row, and what a call consists of
sweep_sizes.py     programs over bytes, leaves, rows, devices and threads
sweep_texts.py     titles, captions, and tables at the end of docs/benchmarks.md
sweep_pictures.py  the drawing
"""
