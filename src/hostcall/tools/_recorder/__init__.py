"""The parts of `hostcall.tools.recorder`.

fields      the columns and arrays that one call of a recorder makes, and their types
tapped      what a tap brings: the tapped function, and its rows and blocks
worker      the threads: the writer and those of sinks, their queues and errors
store       a run's folder, as its one writer sees it
arrow       Arrow IPC streams in files
arrays      arrays that grow: puts together the blocks that streams have
files       refuses links in a run, and says which run can't be read
"""
