// libnccl.so.2: its functions are in the driver (collectives.cc), which this needs.
