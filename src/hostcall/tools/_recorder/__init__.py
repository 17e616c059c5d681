"""The parts of `hostcall.tools.recorder`.

fields      the columns and arrays that one call of a recorder makes, and their types
delivery    what a tap brings: the tapped function, and its rows and blocks
inbox       hands deliveries from the worker that delivers taps to the writer
store       a run's folder, as its one writer sees it
stream      Arrow IPC streams in files
arrays      arrays that grow: what came in .npy files, and where it belongs
files       locks a run, and refuses links in it
feed        gives each sink what the writer has written, on a thread of its own
errors      an error of one of these threads, raised by a barrier or by close
"""
