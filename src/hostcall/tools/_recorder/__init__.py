"""The parts of `hostcall.tools.recorder`.

tapped      what one call stores: its fields, the tapped function, its rows and blocks
worker      the threads: the writer and those of sinks, their queues and errors
store       a run's folder, as its one writer sees it
arrow       Arrow IPC streams in files, and no links
"""
