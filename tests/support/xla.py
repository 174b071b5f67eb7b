"""A flag of XLA for processes that compile more than they compute."""

# Half of the processor time of an example. Tests in the process of pytest optimize as users do.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
