"""The parts of `hostcall.tools.recorder`.

fields      the columns and arrays that one call of a recorder makes, and their types
delivery    what a tap brings: the tapped function, and its rows and blocks
inbox       hands deliveries from the worker that delivers taps to the writer
store       a run's folder, as its one writer sees it
stream      Arrow IPC streams in files
arrays      Zarr v3 arrays that grow along their first axis
files       makes and opens the files of a run, none of them through a link
feed        gives each sink what the writer has written, on a thread of its own
errors      an error of one of these threads, raised by a barrier or by close
"""
