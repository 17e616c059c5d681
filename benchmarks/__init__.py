"""The table of targets: `python -m benchmarks`.

harness.py      rows, cases, targets; how they are timed
rows_call.py    calls in compiled programs
rows_around.py  dispatch, eager calls, import, tracing
render.py       the Markdown table, the JSON, the machine
"""
