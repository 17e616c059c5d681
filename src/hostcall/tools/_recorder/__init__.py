"""The parts of `hostcall.tools.recorder`.

fields      the columns and arrays that one call of a recorder makes, and their types
delivery    what a tap brings: the tapped function, and its rows and blocks
worker      the threads: the writer and those of sinks, their queues and errors
store       a run's folder, as its one writer sees it
stream      Arrow IPC streams in files
arrays      arrays that grow: what came in .npy files, and where it belongs
files       locks a run, and refuses links in it
"""
