"""Look after a root: verify, survey, repair, compact, prune, copy and branch."""
