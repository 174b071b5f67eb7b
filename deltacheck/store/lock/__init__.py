"""Keep writers and readers of a root apart, and waits bounded: leases, pins, locks, deadlines."""
