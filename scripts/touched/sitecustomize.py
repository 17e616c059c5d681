"""Python imports this when it starts: each process of a run that is recorded."""

import os

if "RECORD_TO" in os.environ:
    import recorder

    recorder.record_this_process()
